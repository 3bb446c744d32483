"""How memory that runs out is recognised, of whichever kind. It does not know who ran out."""

from __future__ import annotations

import errno

import torch

_WORDS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)
"""Of RuntimeErrors: the driver's, the CPU allocator's, and a library's without its workspace or,
where the device is full, its handle."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, also where cleaning up after that failed with another error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS):
            return True
        error = error.__context__
    return False
