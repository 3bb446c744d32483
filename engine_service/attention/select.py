"""Which attention library an engine uses. It knows names and capabilities, nothing inside them."""

from __future__ import annotations

from engine_service.attention.base import AttentionBackend, AttentionShape
from engine_service.attention.reference import ReferenceBackend
from engine_service.attention.sdpa import SdpaBackend
from tidemill.runtime.errors import Unsupported

_BACKENDS: dict[str, type[AttentionBackend]] = {
    kind.name: kind for kind in (SdpaBackend, ReferenceBackend)
}

_BEST = {"cpu": "sdpa", "cuda": "sdpa"}


def pick_backend(requested: str, *, device_type: str) -> str:
    """`requested` (EngineConfig.attention_backend), or for `auto` the best for the device.

    Raises Unsupported for a device that no library serves.
    """
    if requested != "auto":
        return requested
    if device_type not in _BEST:
        raise Unsupported(
            f"no attention library for device type {device_type!r}; supported: {', '.join(_BEST)}",
            param="device",
        )
    return _BEST[device_type]


def create_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """The library of that name, ready for `plan`."""
    return _BACKENDS[name](shape)
