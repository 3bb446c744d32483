"""The gated feed-forward layer (SwiGLU; Shazeer 2020, arXiv 2002.05202): down(silu(gate) * up).

It does not know whether every token takes it or only some do.
"""

from __future__ import annotations

import torch
from torch import nn

from engine_service.distributed import ALONE, Group
from engine_service.kernels.activation import silu_mul
from engine_service.layers.ahead import Ahead
from engine_service.layers.linear import Linear
from engine_service.layers.norm import RMSNorm
from engine_service.layers.slots import Share, Slots
from engine_service.schemes.base import LinearScheme

AFTER_FEED_FORWARD = 1
"""Site of the ranks' sums; attention's is 0, so that the two take turns."""


_LEAST_OUTPUTS = 8192
"""Of gate and up, beside whose first rows the others of a sum are added: of 12,800 a quarter takes
as long as three quarters of a sum. Narrower ones would wait for it, in pieces as well."""


class FeedForward(nn.Module):
    """Gate and up in one product. Shapes: T tokens, E hidden size."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        bias: bool,
        scheme: LinearScheme,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = ALONE,
    ) -> None:
        """Every rank of `group` holds a share of the inner width."""
        super().__init__()
        inner, hidden = Share.even(inner_size, group), Share.all_of(hidden_size)
        self.gate_up = Linear(
            hidden,
            {"gate_proj": (inner,), "up_proj": (inner,)},
            bias=bias,
            scheme=scheme,
            device=device,
            dtype=dtype,
        )
        self.down = Linear(
            inner,
            {"down_proj": (hidden,)},
            bias=bias,
            scheme=scheme,
            device=device,
            dtype=dtype,
            group=group,
            site=AFTER_FEED_FORWARD,
        )
        self.takes_pieces = self.gate_up.out_size >= _LEAST_OUTPUTS

    def forward(
        self, residual_TE: torch.Tensor, ahead: Ahead, before: RMSNorm | None = None
    ) -> Ahead:
        """residual + this layer of what lies ahead of it, written into `residual`; returned for the
        product that comes next, which takes it behind the norm `before`."""
        return self.down.add(residual_TE, self._gated(ahead), before)

    def _gated(self, ahead: Ahead) -> torch.Tensor:
        """[T, I / ranks]: silu(gate) * up."""
        if not ahead.pieces:
            return self.gate_up(ahead.x_TE, norm=ahead.norm, gated=True)
        assert ahead.norm is None, "a sum in pieces makes the norm that is read of it"
        hidden = ahead.x_TE.new_empty(len(ahead.x_TE), self.gate_up.out_size // 2)
        for piece in ahead.pieces:
            x_TE, out = ahead.x_TE[piece.rows], hidden[piece.rows]
            with piece.taken():
                if piece.is_last:
                    self.gate_up(x_TE, gated=True, out=out)
                else:
                    silu_mul(self.gate_up(x_TE), out)
        return hidden

    def add(self, residual_TE: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """residual + this rank's part of this layer of x; `residual` is overwritten and
        returned."""
        return self.down.add_part(residual_TE, self.gate_up(x_TE, gated=True))

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names to what is held of them."""
        return self.gate_up.slots(prefix) | self.down.slots(prefix)
