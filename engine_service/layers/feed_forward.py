"""The gated feed-forward layer (SwiGLU; Shazeer 2020, arXiv 2002.05202): down(silu(gate) * up).

It does not know whether every token takes it or only some do.
"""

from __future__ import annotations

import torch
from torch import nn

from engine_service.layers.linear import Linear
from engine_service.layers.norm import RMSNorm
from engine_service.schemes.base import LinearScheme


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
    ) -> None:
        super().__init__()
        self.gate_up = Linear(
            hidden_size,
            {"gate_proj": inner_size, "up_proj": inner_size},
            bias=bias,
            scheme=scheme,
            device=device,
            dtype=dtype,
        )
        self.down = Linear(
            inner_size,
            {"down_proj": hidden_size},
            bias=bias,
            scheme=scheme,
            device=device,
            dtype=dtype,
        )

    def forward(self, residual_TE: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """residual + this layer of norm(residual); `residual` is overwritten and returned."""
        return self.down.add(residual_TE, self.gate_up(residual_TE, norm=norm, gated=True))

    def add(self, residual_TE: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """residual + this layer of x; `residual` is overwritten and returned."""
        return self.down.add(residual_TE, self.gate_up(x_TE, gated=True))

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint names to the views that take them."""
        return self.gate_up.slots(prefix) | self.down.slots(prefix)
