"""The highest scores of a few hundred, of equal ones the one that stands first. It does not know
what is scored.
"""

from __future__ import annotations

import torch

from engine_service.kernels.jit import jit, tl
from engine_service.kernels.order import ordered


def best_of(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count] int64 places of the highest scores, highest first; of equals the lowest place."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]


def empty_choice(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, count] int64 places, [T, count] shares) for a kernel to fill that ranks `scores` [T, X],
    which are contiguous float32 of no more places than a key has room for."""
    assert scores.dtype is torch.float32
    assert scores.is_contiguous()
    assert scores.shape[1] <= 0xFFFF
    shape = (len(scores), count)
    return scores.new_empty(shape, dtype=torch.int64), scores.new_empty(shape)


@jit
def ranked(x: tl.tensor, place: tl.tensor) -> tl.tensor:
    """int64 keys, all different, in the order of the numbers; of equals the lowest place leads."""
    return (ordered(tl.where(x == 0.0, 0.0, x)) << 16) | (0xFFFF - place)


@jit
def never(place: tl.tensor) -> tl.tensor:
    """Keys of what cannot be chosen, unless nothing else is left: then the lowest place is."""
    return ranked(tl.full(place.shape, float("-inf"), tl.float32), place)


@jit
def best_places(key: tl.tensor, COUNT: tl.constexpr, BLOCK_A: tl.constexpr) -> tl.tensor:
    """[A] int64: the places of the highest ranked keys [X], highest first."""
    column = tl.arange(0, BLOCK_A)
    chosen = tl.zeros([BLOCK_A], tl.int64)
    for index in tl.static_range(COUNT):
        best = tl.max(key, axis=0)
        chosen = tl.where(column == index, 0xFFFF - (best & 0xFFFF), chosen)
        key = tl.where(key == best, -(1 << 62), key)
    return chosen
