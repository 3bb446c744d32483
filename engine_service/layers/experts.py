"""Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router gives every token to a few
of many gated feed-forward layers. It knows no rule of routing and no architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine_service.distributed import ALONE, Group
from engine_service.kernels.grouped_linear import mix_experts
from engine_service.kernels.wide_linear import WideWeight
from engine_service.layers.ahead import Ahead, add_ranks
from engine_service.layers.feed_forward import AFTER_FEED_FORWARD, FeedForward
from engine_service.layers.norm import RMSNorm
from engine_service.layers.routing import Router
from engine_service.layers.slots import Piece, Share, Slot, Slots
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
        group: Group = ALONE,
    ) -> None:
        """`scheme` multiplies the shared experts; those of the mixture are not quantised. Every
        rank of `group` routes all tokens, and holds a share of every expert's inner width or, with
        `group.whole_experts`, all of some experts: what others hold is in the ranks' sum."""
        super().__init__()
        num_experts = mixture.router.num_experts
        self._group = group
        by_expert, by_width = (group, ALONE) if group.whole_experts else (ALONE, group)
        self._own = Share.even(num_experts, by_expert)
        self._inner = Share.even(mixture.inner_size, by_width)
        inner = self._inner.size
        wide = torch.promote_types(dtype, torch.float32)

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        self.takes_pieces = False  # routing reads all rows at once
        self.mixture = mixture
        # Logits that are close decide which expert a token takes: they are computed in float32.
        self.router = parameter(num_experts, hidden_size, dtype=wide)
        self._router = WideWeight(self.router)
        self.bias = parameter(num_experts, dtype=wide) if mixture.router.biased else None
        self.gate_up = parameter(self._own.size, 2 * inner, hidden_size, dtype=dtype)
        self.down = parameter(self._own.size, hidden_size, inner, dtype=dtype)
        self.shared = (
            FeedForward(
                hidden_size,
                mixture.shared_size,
                bias=False,
                scheme=scheme,
                device=device,
                dtype=dtype,
                group=group,
            )
            if mixture.shared_size
            else None
        )

    def forward(
        self, residual_TE: torch.Tensor, ahead: Ahead, before: RMSNorm | None = None
    ) -> Ahead:
        """residual + the experts of what lies ahead of them, written into `residual`; returned for
        the product that comes next, which takes it behind the norm `before`."""
        x = ahead.normed()
        experts, shares = self.mixture.router(self._router.product(x), self.bias)
        if self._own.start:
            experts = experts - self._own.start

        def add_to(total: torch.Tensor) -> torch.Tensor:
            if self.shared is not None:
                self.shared.add(total, x)
            return mix_experts(
                total,
                x,
                experts_TA=experts,
                shares_TA=shares,
                gate_up_XWE=self.gate_up,
                down_XEI=self.down,
            )

        def make(rows: slice, room: torch.Tensor | None) -> torch.Tensor:
            return add_to(torch.zeros_like(residual_TE) if room is None else room.zero_())

        if self._group.size == 1:
            return Ahead(add_to(residual_TE), before)
        return add_ranks(self._group, residual_TE, AFTER_FEED_FORWARD, make, before)

    def after_load(self) -> None:
        """What the router's products take besides its weight, which is filled now."""
        self._router.split(self.down.dtype)

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names to what is held of them; every expert has tensors of its own."""
        names, inner = self.mixture.names, self._inner
        slots: Slots = {f"{prefix}.{names.router}.weight": Slot.whole(self.router)}
        if self.bias is not None:
            slots[f"{prefix}.{names.bias}"] = Slot.whole(self.bias)
        if self.shared is not None:
            slots |= self.shared.slots(f"{prefix}.{names.shared}")
        hidden = self.down.shape[1]
        wide, tall = (inner.whole, hidden), (hidden, inner.whole)
        for index in range(self._own.whole):
            expert = f"{prefix}.{names.expert}.{index}"
            slots |= {f"{expert}.{name}.weight": Slot(wide, ()) for name in (names.gate, names.up)}
            slots[f"{expert}.{names.down}.weight"] = Slot(tall, ())
        for index, gate_up, down in zip(self._own.range, self.gate_up, self.down, strict=True):
            expert = f"{prefix}.{names.expert}.{index}"
            halves = {names.gate: gate_up[: inner.size], names.up: gate_up[inner.size :]}
            for name, half in halves.items():
                slots[f"{expert}.{name}.weight"] = Slot(wide, (Piece(half, (inner.slice,)),))
            piece = Piece(down, (slice(None), inner.slice))
            slots[f"{expert}.{names.down}.weight"] = Slot(tall, (piece,))
        return slots
