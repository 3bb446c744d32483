"""The only two ways between host and device: arrays up in one copy, tensors down without waiting.

It does not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 8


def stage(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors on `device` with the arrays' contents, shapes and number formats.

    CPU: wrapped, not copied. Elsewhere: packed into one pinned buffer and copied once, without
    waiting; torch's caching host allocator keeps the buffer until the copy is done.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGN) * _ALIGN)
    pinned = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, offset in zip(tensors, offsets, strict=False):
        _window(pinned, offset, tensor).copy_(tensor)
    remote = pinned.to(device, non_blocking=True)
    return [_window(remote, at, like) for at, like in zip(offsets, tensors, strict=False)]


def _window(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


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
