"""Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router gives every token to a few
of many gated feed-forward layers. It knows no rule of routing and no architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine_service.kernels.grouped_linear import mix_experts
from engine_service.kernels.wide_linear import wide_linear
from engine_service.layers.feed_forward import FeedForward
from engine_service.layers.norm import RMSNorm
from engine_service.layers.routing import Router
from engine_service.schemes.base import LinearScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls the parts of a mixture, below the layer's own name."""

    router: str = "gate"
    bias: str = "gate.expert_bias"
    expert: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of one layer: their router, their size, and what all tokens take besides."""

    router: Router
    inner_size: int
    """Width of one expert between its products."""
    shared_size: int = 0
    """The same of the experts that every token takes, together; 0: there are none."""
    names: ExpertNames = ExpertNames()


class Experts(nn.Module):
    """A layer of experts. Shapes: T tokens, E hidden size, X experts, I inner size."""

    def __init__(
        self,
        hidden_size: int,
        mixture: Mixture,
        *,
        scheme: LinearScheme,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`scheme` multiplies the shared experts; those of the mixture are not quantised."""
        super().__init__()
        num_experts, inner = mixture.router.num_experts, mixture.inner_size
        wide = torch.promote_types(dtype, torch.float32)

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        self.mixture = mixture
        # Logits that are close decide which expert a token takes: they are computed in float32.
        self.router = parameter(num_experts, hidden_size, dtype=wide)
        self.bias = parameter(num_experts, dtype=wide) if mixture.router.biased else None
        self.gate_up = parameter(num_experts, 2 * inner, hidden_size, dtype=dtype)
        self.down = parameter(num_experts, hidden_size, inner, dtype=dtype)
        self.shared = (
            FeedForward(
                hidden_size,
                mixture.shared_size,
                bias=False,
                scheme=scheme,
                device=device,
                dtype=dtype,
            )
            if mixture.shared_size
            else None
        )

    def forward(self, residual_TE: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """residual + the experts of norm(residual); `residual` is overwritten and returned."""
        x = norm(residual_TE)
        experts, shares = self.mixture.router(wide_linear(x, self.router), self.bias)
        if self.shared is not None:
            self.shared.add(residual_TE, x)
        return mix_experts(
            residual_TE,
            x,
            experts_TA=experts,
            shares_TA=shares,
            gate_up_XWE=self.gate_up,
            down_XEI=self.down,
        )

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint names to the views that take them; every expert has tensors of its own."""
        names, inner = self.mixture.names, self.mixture.inner_size
        views: dict[str, torch.Tensor] = {f"{prefix}.{names.router}.weight": self.router}
        if self.bias is not None:
            views[f"{prefix}.{names.bias}"] = self.bias
        if self.shared is not None:
            views |= self.shared.slots(f"{prefix}.{names.shared}")
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            expert = f"{prefix}.{names.expert}.{index}"
            views[f"{expert}.{names.gate}.weight"] = gate_up[:inner]
            views[f"{expert}.{names.up}.weight"] = gate_up[inner:]
            views[f"{expert}.{names.down}.weight"] = down
        return views
