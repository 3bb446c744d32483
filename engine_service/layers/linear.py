"""Linear layers, several projections of one input fused into one matrix.

`forward` is the scheme's product; it does not know number formats.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from engine_service.layers.norm import RMSNorm
from engine_service.schemes.base import LinearScheme


class Linear(nn.Module):
    """Projections that share their input; outputs lie side by side in the order of `parts`."""

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        scheme: LinearScheme,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`parts` maps the checkpoint's name of a projection to its output size."""
        super().__init__()
        self.parts = dict(parts)
        self.scheme = scheme
        out_size = sum(parts.values())
        weights = scheme.create(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._weights: dict[str, torch.Tensor] = {}
        for name, tensor in weights.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)
            self._weights[name] = parameter

    def forward(
        self, x_TI: torch.Tensor, *, norm: RMSNorm | None = None, gated: bool = False
    ) -> torch.Tensor:
        """[T, I] to [T, sum of parts], of norm(x) if there is one.

        `gated` (two parts of equal size): silu(first) * second, [T, O / 2].
        """
        ahead = None if norm is None else (norm.weight, norm.eps)
        return self.scheme.apply(x_TI, self._weights, norm=ahead, gated=gated)

    def add(self, residual_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """residual + forward(x); `residual` is overwritten and returned."""
        return self.scheme.add(residual_TO, x_TI, self._weights)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint names (`<prefix>.<part>.<parameter>`) to the views that take them."""
        views: dict[str, torch.Tensor] = {}
        for name, parameter in self._weights.items():
            pieces = torch.split(parameter, list(self.parts.values()))
            views |= {
                f"{prefix}.{part}.{name}": piece
                for part, piece in zip(self.parts, pieces, strict=True)
            }
        return views
