"""Norms as layers. The arithmetic of RMSNorm lives in kernels/norm.py."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from engine_service.kernels.norm import rms_norm
from engine_service.layers.slots import Slot, Slots


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, statistics in float32 at least."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty(size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as x."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last axis, statistics in float32 at least."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        weight, bias = (torch.empty(size, device=device, dtype=dtype) for _ in range(2))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as x."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names to the parameters that take them."""
        return {
            f"{prefix}.weight": Slot.whole(self.weight),
            f"{prefix}.bias": Slot.whole(self.bias),
        }


class HeadNorm(nn.Module):
    """RMSNorm over the head axis with different weights for query and key heads, in one call."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        weight = torch.empty(num_heads + num_kv_heads, head_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_heads = num_heads
        self.eps = eps

    def forward(self, qk_THD: torch.Tensor) -> torch.Tensor:
        """[T, H + K, D], query heads first."""
        return rms_norm(qk_THD, None, self.eps) * self.weight

    def slots(self, query_name: str, key_name: str) -> Slots:
        """The first head of each kind; `spread` copies it to the others."""
        return {
            f"{query_name}.weight": Slot.whole(self.weight[0]),
            f"{key_name}.weight": Slot.whole(self.weight[self.num_heads]),
        }

    def spread(self) -> None:
        """Gives all heads of a kind the weight that its first head was loaded with."""
        for heads in (self.weight[: self.num_heads], self.weight[self.num_heads :]):
            heads.copy_(heads[0].clone().expand_as(heads))
