"""What a rank holds of a checkpoint's tensors, and where it goes. It reads nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine_service.distributed import ALONE, Group


class Share(NamedTuple):
    """[start, start + size) of an axis that has `whole` entries in the checkpoint."""

    start: int
    size: int
    whole: int

    @classmethod
    def all_of(cls, whole: int) -> Share:
        return cls(0, whole, whole)

    @classmethod
    def even(cls, whole: int, group: Group = ALONE) -> Share:
        """Equal parts; whoever checks sizes ahead of loading says why they must be."""
        assert whole % group.size == 0, (whole, group.size)
        size = whole // group.size
        return cls(group.rank * size, size, whole)

    @classmethod
    def rounded_up(cls, whole: int, group: Group) -> Share:
        """Parts of equal room, of which the last ones may be filled in part only."""
        room = -(-whole // group.size)
        start = min(group.rank * room, whole)
        return cls(start, min(room, whole - start), whole)

    @classmethod
    def of_heads(cls, num_heads: int, head_dim: int, group: Group) -> Share:
        """Whole heads; where there are fewer heads than ranks, neighbours hold the same one."""
        count = max(1, num_heads // group.size)
        first = group.rank * num_heads // group.size
        return cls(first * head_dim, count * head_dim, num_heads * head_dim)

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def range(self) -> range:
        return range(self.start, self.start + self.size)


class Piece(NamedTuple):
    """A view, and the part of the checkpoint's tensor that it takes."""

    view: torch.Tensor
    where: tuple[slice, ...] = ()
    """Of the leading axes; () is everything."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a checkpoint: its whole shape, and this rank's share of it, maybe none."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, view: torch.Tensor) -> Slot:
        return cls(tuple(view.shape), (Piece(view),))

    def held_if(self, is_here: bool) -> Slot:
        """The same, or nothing of it where another rank has what the views stand for."""
        return self if is_here else Slot(self.shape, ())

    @property
    def nbytes(self) -> int:
        """Of this rank's share."""
        return sum(piece.view.nbytes for piece in self.pieces)


Slots = dict[str, Slot]
"""By the checkpoint's names; views never overlap."""
