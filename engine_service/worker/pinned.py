"""Host memory that a GPU copies from and to by itself, at the speed of its link: the driver moves
what is not pinned through memory of its own, several times as slowly.
"""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress

import numpy as np
import torch

_LOG = logging.getLogger("tidemill.engine")


class Pinned:
    """Until it is freed, which it is ahead of the memory."""

    def __init__(self, memory: mmap.mmap, device: torch.device) -> None:
        """Raises RuntimeError where the driver does not take it."""
        self._array = np.frombuffer(memory, np.uint8)
        self._address = 0
        driver, address = torch.cuda.cudart(), self._array.ctypes.data
        self._unregister = driver.cudaHostUnregister
        with torch.cuda.device(device):
            fault = driver.cudaHostRegister(address, len(memory), 0)
            if int(fault) != 0:
                with suppress(RuntimeError):  # else the next launch is told of it
                    torch.zeros(1, device=device)
                raise RuntimeError(f"cudaHostRegister of {len(memory)} bytes: {fault}")
        self._address = address

    def __del__(self) -> None:
        if self._address:
            self._unregister(self._address)


def pinned(memory: mmap.mmap, device: torch.device) -> Pinned | None:
    """None where it stays as it is: no GPU is there, or its driver does not take it."""
    if device.type != "cuda":
        return None
    try:
        return Pinned(memory, device)
    except RuntimeError as error:
        _LOG.warning("KV moves more slowly, its memory is not pinned: %s", error)
        return None
