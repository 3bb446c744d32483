"""Weights in the model's own number format. It knows nothing of packing or scales."""

from __future__ import annotations

import torch

from engine_service.kernels.linear import linear
from engine_service.schemes.base import LinearScheme


class Unquantized(LinearScheme):
    """y = x W^T + b."""

    name = "unquantized"

    def create(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        if device.type == "cpu":
            # Input-major in memory: products of few rows take a fifth less time.
            weight = torch.empty(in_size, out_size, device=device, dtype=dtype).t()
        else:
            weight = torch.empty(out_size, in_size, device=device, dtype=dtype)
        weights = {"weight": weight}
        if bias:
            weights["bias"] = torch.empty(out_size, device=device, dtype=dtype)
        return weights

    def apply(
        self,
        x_TI: torch.Tensor,
        weights: dict[str, torch.Tensor],
        *,
        norm: tuple[torch.Tensor, float] | None = None,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weight, bias = weights["weight"], weights.get("bias")
        return linear(x_TI, weight, bias, norm=norm, gated=gated, out=out)

    def add(
        self, residual_TO: torch.Tensor, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return linear(x_TI, weights["weight"], weights.get("bias"), residual=residual_TO)
