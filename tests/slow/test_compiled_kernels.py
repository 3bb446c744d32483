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

from engine_service.kernels import paged_decode

pytest.importorskip("triton", reason="needs Triton's compiler")

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "engine_service" / "kernels"
MULTIPROCESSOR = {"registers": 65_536, "shared": 228 << 10}
"""Of compute capability 9.0. A program takes a KiB of shared memory beside its own."""


def compiled(folder: Path, capability: int, *tests: str) -> list[dict[str, Any]]:
    """A line per kernel and number formats that the tests launch."""
    report = folder / f"{capability}.jsonl"
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    environ |= {"COMPILE_FOR": str(capability), "COMPILED": str(report)}
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
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_every_kernel_compiles(tmp_path: Path, capability: int) -> None:
    lines = compiled(tmp_path, capability, "tests/kernels", "tests/unit/test_head.py")
    failed = [line for line in lines if line["error"]]
    assert not failed
    assert kernels() <= {line["kernel"] for line in lines}, "no test launches it"


@pytest.mark.slow
def test_a_multiprocessor_holds_as_many_programs_as_splits_count_on(tmp_path: Path) -> None:
    lines = compiled(tmp_path, 90, "tests/kernels/compiled_attention.py")
    fitting = []
    for line in lines:
        threads = 32 * line["warps"]
        by_registers = MULTIPROCESSOR["registers"] // (-(-line["registers"] // 8) * 8 * threads)
        by_memory = MULTIPROCESSOR["shared"] // (line["shared"] + 1024)
        fitting.append(min(by_registers, by_memory))
    assert fitting == [held for _, held in sorted(paged_decode._PROGRAMS_PER_SM.items())], lines


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
    (line,) = compiled(tmp_path, 90, str(test))
    assert line["kernel"] == "_wrong_kernel"
    assert "power of 2" in line["error"]
