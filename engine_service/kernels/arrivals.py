"""Programs that share a sum: each leaves its part and is counted, and whoever comes last finds all
parts. It does not know what is summed.

Adding the parts in their order, whoever does it, gives the same bits every time; atomic sums would
not.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from engine_service.kernels.jit import jit, tl

MOST = 4096
"""Sums of a launch that counts on `arrivals`."""


@lru_cache(maxsize=8)
def arrivals(device: torch.device) -> torch.Tensor:
    """[MOST] int32 counters, 0 between launches. Launches that count on them follow each other on a
    device."""
    return torch.zeros(MOST, dtype=torch.int32, device=device)


@jit
def came_last(arrived_ptr: tl.tensor, num_parts: tl.tensor) -> tl.tensor:
    """Whether all other programs of a sum have stored their parts, as this one has. The last one
    puts the counter back to 0 for the next launch."""
    # All threads have stored before one of them releases, and that one acquires for all.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == num_parts - 1
    if is_last:
        tl.debug_barrier()
        tl.store(arrived_ptr, 0)
    return is_last
