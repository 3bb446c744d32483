"""The only two ways between host and device: arrays up in one copy, tensors down without waiting.

It does not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 16


def stage(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors on `device` with the arrays' contents, shapes and number formats.

    CPU: wrapped, not copied. Elsewhere: packed into one pinned buffer and copied once, without
    waiting; torch's caching host allocator keeps the buffer until the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return _windows(_packed(arrays).to(device, non_blocking=True), arrays)


class Arena:
    """A fixed place on a device: what is put there lies where a captured graph reads it."""

    def __init__(self, size: int, device: torch.device) -> None:
        """`size` in bytes, at least `size_of` of whatever will be put."""
        self._remote = torch.zeros(size, dtype=torch.uint8, device=device)

    @staticmethod
    def size_of(arrays: Sequence[np.ndarray]) -> int:
        """Bytes that these arrays take."""
        return _offsets(arrays)[-1]

    def windows(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Where `put` leaves arrays of these shapes and number formats."""
        return _windows(self._remote, arrays)

    def put(self, arrays: Sequence[np.ndarray]) -> None:
        """Overwrites the windows in one copy, behind everything launched before."""
        packed = _packed(arrays)
        self._remote[: len(packed)].copy_(packed, non_blocking=True)


def _offsets(arrays: Sequence[np.ndarray]) -> list[int]:
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // _ALIGN) * _ALIGN)
    return offsets


def _packed(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """One pinned buffer with the arrays' bytes."""
    offsets = _offsets(arrays)
    pinned = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
    memory = pinned.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        memory[offset : offset + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return pinned


def _windows(buffer: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    return [
        buffer[offset : offset + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for array, offset in zip(arrays, _offsets(arrays), strict=False)
    ]


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


class HostCopies:
    """Tensors on their way to the host. `add` never waits; `wait` does, once, for all of them."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host tensor that holds the contents after `wait`."""
        if self._event is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def seal(self) -> None:
        """Marks the point that `wait` waits for: everything added so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Returns when every added tensor is on the host."""
        if self._event is not None:
            self._event.synchronize()
