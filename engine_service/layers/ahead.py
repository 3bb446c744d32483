"""What stands between a sum and the product behind it: the residual stream, and a norm of it.

Ranks that sum many rows over each other's memory hold whole ones while they do, and make the norm
then. It knows no products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine_service.beside import Piece
from engine_service.distributed import Group
from engine_service.layers.norm import RMSNorm
from engine_service.pushes import MakeRows


class Ahead(NamedTuple):
    """What the next product takes: x, behind `norm` where that is still to be made."""

    x_TE: torch.Tensor
    norm: RMSNorm | None = None
    pieces: Sequence[Piece] = ()
    """All rows of x, if some are still to come: only where the product has asked for that."""

    def normed(self) -> torch.Tensor:
        """Same shape as x."""
        return self.x_TE if self.norm is None else self.norm(self.x_TE)


def add_ranks(
    group: Group,
    residual_TE: torch.Tensor,
    site: int,
    make: MakeRows,
    before: RMSNorm | None,
    *,
    inputs: int = 0,
    in_pieces: bool = False,
) -> Ahead:
    """`Group.add_sum`; what it leaves is read behind the norm `before`."""
    own = None if before is None else (before.weight, before.eps)
    normed_TE, pieces = group.add_sum(
        residual_TE, site, make, norm=own, inputs=inputs, in_pieces=in_pieces
    )
    if normed_TE is None:
        return Ahead(residual_TE, before, pieces)
    return Ahead(normed_TE, None, pieces)
