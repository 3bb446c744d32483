"""Which attention library an engine uses, and why. It knows names and capabilities of libraries,
nothing inside them.

`rank_backends` is pure; `open_backend` reads the machine and takes the first that works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from engine_service.attention.base import AttentionBackend, AttentionShape
from engine_service.attention.flash import (
    FlashBackend,
    FlashCall,
    load_flash2,
    load_flash3,
    load_flash4,
)
from engine_service.attention.probe import probe
from engine_service.attention.reference import ReferenceBackend
from engine_service.attention.sdpa import SdpaBackend
from engine_service.attention.triton import TritonBackend
from engine_service.kernels.jit import in_one_line, kernel_fault
from tidemill.runtime.errors import Unsupported

_HALF = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256


class Choice(NamedTuple):
    """A library that can be tried."""

    name: str
    """As `create_backend` takes it."""
    reason: str
    """What spoke against better ones; empty where nothing did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Everything the choice depends on."""

    device_type: str
    compute: tuple[int, int] | None
    """CUDA compute capability; None on other devices."""
    dtype: torch.dtype
    head_dim: int
    page_size: int
    installed: Mapping[str, str]
    """FlashAttention distributions that are installed, with their versions."""
    kernel_fault: str | None
    """Why Triton's kernels do not run there (kernels/jit.py); None: they do. On the CPU they can
    run as numpy programs (TRITON_INTERPRET=1)."""


class _Flash(NamedTuple):
    """What one generation of FlashAttention asks of a device and of the cache."""

    distribution: str
    majors: tuple[int, ...]
    """Major compute capabilities on which it reads paged caches."""
    page_unit: int
    """Page sizes are multiples of this."""


_FLASH = {
    "flash4": _Flash("flash-attn-4", (9, 10, 11), 1),
    "flash3": _Flash("flash-attn-3", (9,), 1),
    "flash2": _Flash("flash-attn", (8, 9, 10, 11, 12), 256),
}

_LIBRARIES = {
    "flash": tuple(_FLASH),
    "triton": ("triton",),
    "sdpa": ("sdpa",),
    "reference": ("reference",),
}
"""What an operator may ask for, and the libraries that answer, best first."""

_AUTO = {"cpu": ("sdpa",), "cuda": (*_FLASH, "triton", "sdpa")}


def rank_backends(requested: str, machine: Capability) -> tuple[Choice, ...]:
    """Libraries to try in turn, for `requested` (EngineConfig.attention_backend).

    Raises Unsupported for an unknown device or name, and for a requested library that cannot work
    here; it says what is missing and what to pass.
    """
    if machine.device_type not in _AUTO:
        raise Unsupported(
            f"no attention library for device type {machine.device_type!r}; supported:"
            f" {', '.join(_AUTO)}",
            param="device",
        )
    if requested not in ("auto", *_LIBRARIES):
        raise _refusal(requested, ["it is not part of this build"], machine)
    choices: list[Choice] = []
    obstacles: list[str] = []
    for name in _candidates(requested, machine):
        obstacle = _obstacle(name, machine)
        if obstacle is None:
            choices.append(Choice(name, "; ".join(obstacles)))
        elif obstacle not in obstacles:
            obstacles.append(obstacle)
    if not choices:
        raise _refusal(requested, obstacles, machine)
    return tuple(choices)


def _candidates(requested: str, machine: Capability) -> list[str]:
    """Best first. Of FlashAttention's generations those that are installed, or all if none is."""
    names = _AUTO[machine.device_type] if requested == "auto" else _LIBRARIES[requested]
    return [
        name
        for name in names
        if name not in _FLASH
        or not machine.installed
        or _FLASH[name].distribution in machine.installed
    ]


def _obstacle(name: str, machine: Capability) -> str | None:
    """Why the library cannot be used, or None."""
    if name in _FLASH:
        return _flash_obstacle(_FLASH[name], machine)
    return _triton_obstacle(machine) if name == "triton" else None


def _flash_obstacle(flash: _Flash, machine: Capability) -> str | None:
    if machine.device_type != "cuda":
        return "FlashAttention runs on CUDA devices"
    if not machine.installed:
        return "FlashAttention is not installed (pip install 'tidemill[flash]')"
    named = f"{flash.distribution} {machine.installed[flash.distribution]}"
    assert machine.compute is not None
    major = machine.compute[0]
    if major not in flash.majors:
        wanted = ", ".join(f"{known}.x" for known in flash.majors)
        return f"{named} is for compute capability {wanted}, this is {_dotted(machine.compute)}"
    if machine.dtype not in _HALF:
        return f"{named} has no {_format(machine.dtype)}"
    limit = _MAX_HEAD_DIM if major < 10 or flash.distribution != "flash-attn-4" else 128
    if machine.head_dim % 8 or machine.head_dim > limit:
        return f"{named} takes head sizes in eights up to {limit}, not {machine.head_dim}"
    if machine.page_size % flash.page_unit:
        return f"{named} takes pages in multiples of {flash.page_unit}, not {machine.page_size}"
    # Short queries go to Triton's kernels.
    return _triton_obstacle(machine)


def _triton_obstacle(machine: Capability) -> str | None:
    if machine.kernel_fault is not None:
        return machine.kernel_fault
    if machine.device_type == "cpu" and machine.dtype == torch.bfloat16:
        # Triton 3.6: it keeps bfloat16 as uint16 and multiplies the bit patterns.
        return "Triton's interpreter has no bfloat16"
    if machine.dtype not in (torch.float32, *_HALF):
        return f"Triton's kernels have no {_format(machine.dtype)}"
    if machine.head_dim > _MAX_HEAD_DIM:
        return f"Triton's kernels take head sizes up to {_MAX_HEAD_DIM}, not {machine.head_dim}"
    return None


def _refusal(requested: str, reasons: Sequence[str], machine: Capability) -> Unsupported:
    working = [
        name
        for name in ("triton", "sdpa")
        if name != requested and _obstacle(name, machine) is None
    ]
    instead = f"; pass --attention-backend {' or '.join(['auto', *working])}"
    return Unsupported(
        f"attention_backend {requested!r} does not work here: {'; '.join(reasons)}"
        + (instead if requested != "auto" else ""),
        param="attention_backend",
    )


def _dotted(compute: tuple[int, int]) -> str:
    return f"{compute[0]}.{compute[1]}"


def _format(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def open_backend(
    requested: str,
    shape: AttentionShape,
    device: torch.device,
    *,
    windows: Iterable[int | None],
) -> tuple[AttentionBackend, str]:
    """The first ranked library that computes right numbers on `device`, and a line for the log.

    `windows` are ModelTraits.windows. Raises what `rank_backends` raises, and Unsupported with
    every reason when no library works.
    """
    machine = read_capability(shape, device)
    failures: list[str] = []
    for choice in rank_backends(requested, machine):
        try:
            backend = create_backend(choice.name, shape)
        except Exception as error:
            failures.append(f"{choice.name} does not import: {in_one_line(error)}")
            continue
        failure = probe(backend, device, windows=windows)
        if failure is None:
            against = "; ".join(filter(None, (choice.reason, *failures)))
            best = "the best here" if requested == "auto" else "requested"
            return backend, f"{choice.name}: {against or best}"
        failures.append(f"{choice.name} failed: {failure}")
    raise _refusal(requested, failures, machine)


def read_capability(shape: AttentionShape, device: torch.device) -> Capability:
    """What this machine offers a model of that shape; no library is imported for it."""
    cuda = device.type == "cuda"
    return Capability(
        device_type=device.type,
        compute=torch.cuda.get_device_capability(device) if cuda else None,
        dtype=shape.dtype,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        installed=_installed(),
        kernel_fault=kernel_fault(device),
    )


def _installed() -> dict[str, str]:
    """FlashAttention distributions and their versions, from their metadata alone."""
    found = {}
    for flash in _FLASH.values():
        try:
            found[flash.distribution] = version(flash.distribution)
        except PackageNotFoundError:
            continue
    return found


def create_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """The library of that name, ready for `plan`. Raises ImportError where FlashAttention is not
    installed."""
    return _BACKENDS[name](shape)


def _flash(load: Callable[[], FlashCall], shape: AttentionShape) -> AttentionBackend:
    return FlashBackend(shape, load(), TritonBackend(shape))


_BACKENDS: dict[str, Callable[[AttentionShape], AttentionBackend]] = {
    "flash4": partial(_flash, load_flash4),
    "flash3": partial(_flash, load_flash3),
    "flash2": partial(_flash, load_flash2),
    "triton": TritonBackend,
    "sdpa": SdpaBackend,
    "reference": ReferenceBackend,
}
