"""Which part of a whole model's pages a rank holds, and how the shares of all ranks make them up.

Pure functions of sizes and host tensors. Shape legend: N pages, L layers, G page size, K key-value
heads, D head size; a small l or k is what one rank has of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engine_service.distributed import Group
from engine_service.layers.slots import Share
from engine_service.stages import Stage


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What the bytes of a page are, a whole model's or a share of it: layer by layer, keys before
    values."""

    shape: tuple[int, int, int, int, int]
    """[L, 2, G, K, D]."""
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, num_pages: int) -> torch.Tensor:
        """[N, L, 2, G, K, D] on the host."""
        return torch.empty((num_pages, *self.shape), dtype=self.dtype)

    def opened(self, content: bytearray | memoryview) -> torch.Tensor:
        """[N, L, 2, G, K, D] of pages' bytes, which are not copied."""
        return torch.frombuffer(content, dtype=self.dtype).view(-1, *self.shape)


class PageShare(NamedTuple):
    """What a rank holds of each page."""

    layers: range
    heads: range
    is_copy: bool
    """A rank ahead of it holds the same: there are fewer heads than ranks."""


def share_of(group: Group, num_layers: int, num_kv_heads: int) -> PageShare:
    """That of this rank of the group."""
    num_holders = max(1, group.size // num_kv_heads)
    return PageShare(
        group.stage.layers(num_layers),
        Share.of_heads(num_kv_heads, 1, group).range,
        group.rank % num_holders > 0,
    )


def shares_of(num_ranks: int, num_stages: int, num_layers: int, num_heads: int) -> list[PageShare]:
    """Those of all ranks, in their order."""
    size = num_ranks // num_stages
    return [
        share_of(Group(rank % size, size, Stage(rank // size, num_stages)), num_layers, num_heads)
        for rank in range(num_ranks)
    ]


def cut(whole: torch.Tensor, share: PageShare) -> torch.Tensor:
    """[N, l, 2, G, k, D], a view of whole pages [N, L, 2, G, K, D]."""
    layers, heads = share.layers, share.heads
    return whole[:, layers.start : layers.stop, :, :, heads.start : heads.stop]


def join(whole: torch.Tensor, shares: Sequence[PageShare], parts: Sequence[bytearray]) -> None:
    """Fills whole pages [N, L, 2, G, K, D] with the bytes of `cut` for each share. Raises an
    error of torch for bytes of another size."""
    for share, part in zip(shares, parts, strict=True):
        place = cut(whole, share)
        place.copy_(torch.frombuffer(part, dtype=whole.dtype).view(place.shape))


def bytes_of(host: torch.Tensor) -> memoryview:
    """Of a contiguous host tensor; not copied."""
    flat: np.ndarray[Any, Any] = host.view(torch.uint8).view(-1).numpy()
    return flat.data
