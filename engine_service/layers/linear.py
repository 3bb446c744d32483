"""Linear layers, several projections of one input fused into one matrix.

A rank holds some of the outputs (its share of every projection), or some of the inputs: then its
product is one of the parts that the ranks' sum consists of (Shoeybi et al. 2019, arXiv 1909.08053).
`forward` is the scheme's product; it does not know number formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from engine_service.distributed import ALONE, Group
from engine_service.layers.ahead import Ahead, add_ranks
from engine_service.layers.norm import RMSNorm
from engine_service.layers.slots import Piece, Share, Slot, Slots
from engine_service.schemes.base import LinearScheme


class Linear(nn.Module):
    """Projections that share their input; outputs lie side by side in the order of `parts`."""

    def __init__(
        self,
        inputs: Share,
        parts: Mapping[str, Sequence[Share]],
        *,
        bias: bool,
        scheme: LinearScheme,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = ALONE,
        site: int = 0,
    ) -> None:
        """`parts` maps the checkpoint's name of a projection to what is held of its outputs, as
        many shares as it fuses. `group` are those among whom the inputs are shared, if they are;
        `site` is where their sums are made."""
        super().__init__()
        self.inputs = inputs
        self.parts = {name: tuple(shares) for name, shares in parts.items()}
        self.scheme = scheme
        self._group, self._site = ALONE if inputs.is_whole else group, site
        weights = scheme.create(inputs.size, self.out_size, bias=bias, device=device, dtype=dtype)
        self._weights: dict[str, torch.Tensor] = {}
        for name, tensor in weights.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)
            self._weights[name] = parameter

    @property
    def out_size(self) -> int:
        """Of all parts."""
        return sum(share.size for shares in self.parts.values() for share in shares)

    def forward(
        self,
        x_TI: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, I] to [T, sum of parts], of norm(x) if there is one; in `out`, if there is one
        (without norm).

        `gated` (two parts of equal size): silu(first) * second, [T, O / 2].
        """
        ahead = None if norm is None else (norm.weight, norm.eps)
        return self.scheme.apply(x_TI, self._weights, norm=ahead, gated=gated, out=out)

    def add(
        self,
        residual_TO: torch.Tensor,
        x_TI: torch.Tensor,
        before: RMSNorm | None = None,
        *,
        in_pieces: bool = False,
    ) -> Ahead:
        """residual + the sum of all ranks' forward(x), written into `residual`; returned for the
        product that comes next, which takes it behind the norm `before`, and in pieces if it
        can."""
        if self._group.size == 1:
            return Ahead(self.add_part(residual_TO, x_TI), before)
        scheme, weights = self.scheme, self._weights

        def make(rows: slice, room: torch.Tensor | None) -> torch.Tensor:
            return scheme.apply(x_TI[rows], weights, out=room)

        return add_ranks(
            self._group,
            residual_TO,
            self._site,
            make,
            before,
            inputs=x_TI.shape[1],
            in_pieces=in_pieces,
        )

    def add_part(self, residual_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """residual + forward(x), a part of the ranks' sum; `residual` is overwritten and
        returned."""
        return self.scheme.add(residual_TO, x_TI, self._weights)

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names (`<prefix>.<part>.<parameter>`) to what is held of them."""
        return {
            f"{prefix}.{part}.{name}": slot
            for name, parameter in self._weights.items()
            for part, slot in self._slots_of(parameter).items()
        }

    def _slots_of(self, parameter: torch.Tensor) -> Slots:
        """By part. A parameter without an input axis (a bias) counts once in the ranks' sum: all
        ranks but the first leave theirs at zero."""
        has_inputs = parameter.ndim > 1
        inputs = (self.inputs.slice,) if has_inputs else ()
        is_mine = has_inputs or self._group.rank == 0
        if not is_mine:
            parameter.zero_()
        slots: Slots = {}
        start = 0
        for name, shares in self.parts.items():
            pieces, offset = [], 0
            for share in shares:
                view = parameter[start : start + share.size]
                outputs = slice(offset + share.start, offset + share.start + share.size)
                pieces.append(Piece(view, (outputs, *inputs)))
                start += share.size
                offset += share.whole
            shape = (offset, *((self.inputs.whole,) if has_inputs else ()))
            slots[name] = Slot(shape, tuple(pieces) if is_mine else ())
        return slots
