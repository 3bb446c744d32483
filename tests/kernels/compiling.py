"""A pytest plugin: launches of Triton kernels are compiled for a GPU that need not be there, and
not run. What a test then finds in its tensors means nothing; only what does not compile counts.

    TRITON_INTERPRET=0 COMPILE_FOR=90 COMPILED=FILE pytest -p tests.kernels.compiling tests/kernels

FILE gets a line per kernel, GPU and number formats of its arguments; other sizes of the same, of
which tests launch hundreds, are not compiled again. COMPILE_FOR may name several GPUs, as 90,100:
their launches must be the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import ty_to_cpp
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine_service.kernels import jit

CAPABILITIES = [int(word) for word in os.environ["COMPILE_FOR"].split(",")]
"""10 x major + minor."""
CAPABILITY = CAPABILITIES[0]
_OVERLAPS = CAPABILITY >= 90
assert all((one >= 90) is _OVERLAPS for one in CAPABILITIES), "one launches as another would not"
_REPORT = Path(os.environ["COMPILED"])
_SEEN: set[tuple[object, ...]] = set()
_RUN = JITFunction.run


class _Device:
    """What Triton asks a driver when it compiles. It keeps what it has compiled by device: `number`
    is that of a capability."""

    number = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITIES[self.number], 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        return str(ty_to_cpp(kind))


def usage(kernel: Any) -> dict[str, int]:
    """Of a compiled kernel: `registers` of a thread, bytes of `shared` memory and `warps` of a
    program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
        told = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+)", told)
    assert found, told
    made = kernel.metadata
    return {"registers": int(found[1]), "shared": made.shared, "warps": made.num_warps}


def _formats(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    return tuple(map(_formats, value)) if isinstance(value, tuple) else value is None


def _compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    name, formats = self.fn.__name__, tuple(map(_formats, args))
    if (name, formats) in _SEEN:
        return
    _SEEN.add((name, formats))
    for number, capability in enumerate(CAPABILITIES):
        _DEVICE.number = number
        line: dict[str, Any] = {"kernel": name, "capability": capability, "formats": str(formats)}
        line["error"] = None
        try:
            line |= usage(_RUN(self, *args, grid=grid, warmup=True, **options))
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"
        with _REPORT.open("a") as file:
            file.write(json.dumps(line) + "\n")


_DEVICE = _Device()
driver.set_active(_DEVICE)
JITFunction.run = _compile
# Before kernel files take it from there: tensors of the CPU say no.
jit.overlaps_launches = lambda device: _OVERLAPS
_SHARED = max(jit.shared_of((one // 10, one % 10)) for one in CAPABILITIES)
jit.shared_memory = lambda device: _SHARED


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    try:
        yield
    except Exception:
        return True
    return True
