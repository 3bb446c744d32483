"""Triton where there is one: every kernel file takes `triton`, `tl` and `jit` from here, and asks
here whether kernels run on a device at all.

A CPU installation may lack Triton. Kernel files still import there; launching one of their
kernels then says what is missing. It knows no kernel but the one that it tries a device with.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from engine_service.out_of_memory import is_out_of_memory

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "MOST_SHARED",
    "MUCH_SHARED",
    "fitting_stages",
    "give_up_kernels",
    "in_one_line",
    "is_kernel_failure",
    "jit",
    "kernel_fault",
    "overlaps_launches",
    "runs_triton",
    "shared_memory",
    "shared_of",
    "tl",
    "triton",
]

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform, or a CPU installation
    triton = tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run as numpy programs on the CPU, for tests: slow, and with the same arithmetic."""

HAS_TRITON = triton is not None


if INTERPRETED and HAS_TRITON:
    from engine_service.kernels import interpreter

    interpreter.mend()


class _Missing:
    """Stands for a kernel that cannot be compiled here."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._name = kernel.__name__

    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise RuntimeError(f"kernel {self._name} needs Triton: pip install triton")


def jit(kernel: Callable[..., Any], **options: Any) -> Any:
    """`triton.jit` with its options, or a stand-in that raises at launch."""
    return _Missing(kernel) if triton is None else triton.jit(kernel, **options)


@lru_cache(maxsize=8)
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel there may start before the one ahead of it has ended (programmatic dependent
    launch, compute capability 9 and up). Such a kernel waits itself before it reads any result."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


MOST_SHARED = 227 << 10
"""Bytes of shared memory for a program on compute capabilities 9.0 and 10.0."""
MUCH_SHARED = 163 << 10
"""No less is much, and tiles of several stages fit."""
_SHARED = MappingProxyType(
    {(8, 0): MUCH_SHARED, (8, 7): MUCH_SHARED}
    | dict.fromkeys([(8, 6), (8, 9), (12, 0), (12, 1)], 99 << 10)
)
"""By compute capability; the others have the most."""


def shared_of(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a program may use."""
    return _SHARED.get(capability, MOST_SHARED)


@lru_cache(maxsize=8)
def shared_memory(device: torch.device) -> int:
    """`shared_of` a device; the interpreter has the most."""
    if device.type != "cuda":
        return MOST_SHARED
    return shared_of(torch.cuda.get_device_capability(device))


def fitting_stages(num_stages: int, device: torch.device) -> int:
    """`num_stages` of a software pipeline, or two where the tiles of more do not fit."""
    return num_stages if shared_memory(device) >= MUCH_SHARED else min(num_stages, 2)


_LEAST_CAPABILITY = (8, 0)
"""Older GPUs have no bfloat16 and no asynchronous copies, and Triton no support for them."""
_MOST_CHARACTERS = 400
"""Of an error's text."""
_FAULTS: dict[torch.device, str | None] = {}
"""What `kernel_fault` has found."""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether Triton's kernels compute what starts from `x`; else plain torch does.

    Every operator asks this at every call. They do so for tensors of a CUDA device on which kernels
    run, except for float64.
    """
    return x.is_cuda and x.dtype is not torch.float64 and kernel_fault(x.device) is None


def kernel_fault(device: torch.device) -> str | None:
    """Why Triton's kernels do not run on `device`, in one line, or None.

    The first question about a CUDA device compiles and runs a kernel of one line there and waits
    for it, so it must come before a graph is captured. The answer stays; memory that runs out is
    none, and raised.
    """
    if device not in _FAULTS:
        _FAULTS[device] = _find_fault(device)
    return _FAULTS[device]


def give_up_kernels(device: torch.device, fault: str) -> None:
    """From now on plain torch computes everything on `device`; `fault` says why."""
    _FAULTS[device] = fault


def is_kernel_failure(error: BaseException) -> bool:
    """Whether a kernel could not be built, loaded or launched, rather than anything else.

    Triton raises its own class, except for its launcher's C compiler, for the driver's answers and
    for passes of its compiler.
    """
    if triton is None:
        return False
    own = isinstance(error, triton.errors.TritonError | subprocess.CalledProcessError)
    text = str(error)
    told = ("C compiler", "PassManager::run failed")
    return own or text.startswith("Triton Error") or any(words in text for words in told)


def in_one_line(error: BaseException) -> str:
    """Class and text of an error for a log. Compilers tell on several lines where and only then
    what."""
    if isinstance(error, subprocess.CalledProcessError):
        return (
            "the C compiler cannot build Triton's launcher (install Python's headers, python3-dev):"
            f" {error.cmd[0]} ended with status {error.returncode}"
        )
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_CHARACTERS]}"


@jit
def _double_kernel(x_ptr: tl.tensor, SIZE: tl.constexpr, PDL: tl.constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
    places = x_ptr + tl.arange(0, SIZE)
    tl.store(places, tl.load(places) * 2.0)


def _find_fault(device: torch.device) -> str | None:
    if triton is None:
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda":
        return None if INTERPRETED else "Triton's kernels run on CUDA devices"
    compute = torch.cuda.get_device_capability(device)
    if compute < _LEAST_CAPABILITY:
        least, own = (".".join(map(str, pair)) for pair in (_LEAST_CAPABILITY, compute))
        return f"Triton needs compute capability {least}, this is {own}"
    try:
        doubled = _doubled_ones(device)
    except Exception as error:
        if is_out_of_memory(error):
            raise  # it says nothing about kernels, and this answer stays
        return in_one_line(error)
    return None if bool((doubled == 2.0).all()) else "Triton's kernels compute wrong numbers"


def _doubled_ones(device: torch.device) -> torch.Tensor:
    x, overlap = torch.ones(32, device=device), overlaps_launches(device)
    with torch.cuda.device(device):
        _double_kernel[(1,)](x, SIZE=32, PDL=overlap, launch_pdl=overlap)
    return x
