"""Every Triton kernel compiles for the GPUs that it is for, on a machine without one.

The interpreter computes what the compiler refuses, so numbers that are right on a CPU do not say
that a kernel can be built. What tests/kernels launch is compiled instead of interpreted here.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_service.kernels import jit, paged_decode

pytest.importorskip("triton", reason="needs Triton's compiler")

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "engine_service" / "kernels"
INTERPRETED = "tests/kernels/test_interpreter.py"
"""It launches in processes of its own, which interpret in any case."""
MULTIPROCESSOR = {"registers": 65_536, "shared": 228 << 10}
"""Of compute capability 9.0. A program takes a KiB of shared memory beside its own."""


def compiled(folder: Path, capabilities: tuple[int, ...], *tests: str) -> list[dict[str, Any]]:
    """A line per kernel, capability and number formats that the tests launch."""
    report, told = folder / "compiled.jsonl", ",".join(map(str, capabilities))
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    environ |= {"COMPILE_FOR": told, "COMPILED": str(report)}
    environ.pop("PYTEST_ADDOPTS", None)  # of this run, and our conftest may not be there
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.compiling", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in report.read_text().splitlines()]


def kernels() -> set[str]:
    """Of all files, what is launched: functions whose name ends so."""
    trees = [ast.parse(file.read_text()) for file in KERNELS.glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        node.name for node in functions if node.name.endswith("_kernel") and node.decorator_list
    }


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capabilities", [(90, 100, 120), (80,)], ids=str)
def test_every_kernel_compiles(tmp_path: Path, capabilities: tuple[int, ...]) -> None:
    """Those together that get the same launches: tests run once for all of them."""
    tests = ("tests/kernels", "tests/unit/test_head.py", f"--ignore={INTERPRETED}")
    lines = compiled(tmp_path, capabilities, *tests)
    failed = [line for line in lines if line["error"]]
    assert not failed
    for capability in capabilities:
        launched = {line["kernel"] for line in lines if line["capability"] == capability}
        assert kernels() <= launched, "no test launches it"


@pytest.mark.slow
def test_a_multiprocessor_holds_as_many_programs_as_splits_count_on(tmp_path: Path) -> None:
    lines = compiled(tmp_path, (90,), "tests/kernels/compiled_attention.py")
    fitting = []
    for line in lines:
        threads = 32 * line["warps"]
        by_registers = MULTIPROCESSOR["registers"] // (-(-line["registers"] // 8) * 8 * threads)
        by_memory = MULTIPROCESSOR["shared"] // (line["shared"] + 1024)
        fitting.append(min(by_registers, by_memory))
    assert fitting == [held for _, held in sorted(paged_decode._PROGRAMS_PER_SM.items())], lines


@pytest.mark.slow
def test_tiles_fit_where_shared_memory_is_small(tmp_path: Path) -> None:
    """Triton refuses to launch those that do not. The second one is cut for larger devices."""
    room = jit.shared_of((8, 9))
    lines = compiled(tmp_path, (89,), "tests/kernels/compiled_cuts.py")
    assert [line["error"] for line in lines] == [None] * 6
    _, control, *_ = sizes = [line["shared"] for line in lines]
    assert [size <= room for size in sizes] == [True, False, True, True, True, True], sizes
    assert control <= jit.MOST_SHARED


def test_control_a_kernel_that_does_not_compile_is_told(tmp_path: Path) -> None:
    test = tmp_path / "test_wrong.py"
    test.write_text(
        "import torch\n"
        "from engine_service.kernels.jit import jit, tl\n\n\n"
        "@jit\n"
        "def _wrong_kernel(x_ptr, SIZE: tl.constexpr):\n"
        "    tl.store(x_ptr + tl.arange(0, SIZE), 1.0)\n\n\n"
        "def test_it():\n"
        "    _wrong_kernel[(1,)](torch.zeros(3), SIZE=3)\n"
        "    assert False\n"
    )
    lines = compiled(tmp_path, (90, 100), str(test))
    assert [line["capability"] for line in lines] == [90, 100]
    for line in lines:
        assert line["kernel"] == "_wrong_kernel"
        assert "power of 2" in line["error"]
