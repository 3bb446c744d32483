"""What a layer of experts is made of: the router's product, its choice, rows sorted by expert, and
the experts themselves. Eager is the formula as transformers writes it. It does not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from engine_service.kernels.group_choice import GroupRule, choose_experts, choose_experts_ref
from engine_service.kernels.group_rows import group_rows_triton
from engine_service.kernels.grouped_linear import choose_tiles, mix_experts
from engine_service.kernels.likely_choice import SoftmaxRule, choose_likely, choose_likely_ref
from engine_service.kernels.wide_linear import WideWeight, wide_linear_ref
from tidemill.bench.kernel_cases import Case, Make


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer, and the rule that chooses some of them for a token."""

    name: str
    num_experts: int
    hidden: int
    inner: int
    rule: GroupRule | SoftmaxRule

    @property
    def per_token(self) -> int:
        return self.rule.per_token


MIXTURES = (
    Mixture("llada2-mini", 256, 2048, 512, GroupRule(8, 8, 4, True, 2.5)),
    Mixture("qwen3-30b-a3b", 128, 2048, 768, SoftmaxRule(8, True)),
)


def cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Of every mixture, for a few tokens and for many."""
    for mixture in MIXTURES:
        for tokens in (32, 64, 256, 1024, 8192):
            yield router(mixture, tokens, dtype, device)
            yield choice(mixture, tokens, device)
            yield sorting(mixture, tokens, dtype, device)
            yield experts(mixture, tokens, dtype, device)


def router(mixture: Mixture, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    """A product with a float32 weight."""
    num_experts, hidden = mixture.num_experts, mixture.hidden

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.randn(num_experts, hidden, device=device)
        return torch.randn(tokens, hidden, device=device).to(dtype), weight

    def ours() -> Callable[[], object]:
        x, weight = inputs()
        wide = WideWeight(weight)
        wide.split(dtype)
        return lambda: wide.product(x)

    def eager() -> Callable[[], object]:
        x, weight = inputs()
        return lambda: wide_linear_ref(x, weight)

    return Case(
        name="router",
        size=f"{mixture.name}, {tokens} tokens",
        moved=tokens * hidden * dtype.itemsize + (hidden + tokens) * num_experts * 4,
        flop=2 * tokens * hidden * num_experts,
        ours=ours,
        eager=eager,
    )


def choice(mixture: Mixture, tokens: int, device: torch.device) -> Case:
    """Which experts tokens take."""
    rule = mixture.rule

    def make(*, is_ours: bool) -> Make:
        def inputs() -> Callable[[], object]:
            logits = torch.randn(tokens, mixture.num_experts, device=device)
            if isinstance(rule, SoftmaxRule):
                likely = choose_likely if is_ours else choose_likely_ref
                return lambda: likely(logits, rule)
            bias = torch.randn(mixture.num_experts, device=device)
            choose = choose_experts if is_ours else choose_experts_ref
            return lambda: choose(logits, bias, rule)

        return inputs

    return Case(
        name="choose_experts",
        size=f"{mixture.name}, {tokens} tokens",
        ours=make(is_ours=True),
        eager=make(is_ours=False),
    )


def sorting(mixture: Mixture, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Rows by expert, in whole tiles; eager only sorts."""
    num_rows, num_experts = tokens * mixture.per_token, mixture.num_experts
    block_m = choose_tiles(num_rows, num_experts, dtype, gated=True).block_m

    def make(group: Callable[[torch.Tensor], object]) -> Make:
        def inputs() -> Callable[[], object]:
            chosen = torch.randint(num_experts, (num_rows,), device=device)
            return lambda: group(chosen)

        return inputs

    return Case(
        name="group_rows",
        size=f"{mixture.name}, {num_rows} rows",
        ours=make(partial(group_rows_triton, num_experts=num_experts, block_m=block_m)),
        eager=make(partial(torch.sort, stable=True)),
    )


def experts(mixture: Mixture, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Rows sorted, both products of every expert, and their weighted sums."""
    num_experts, hidden, inner = mixture.num_experts, mixture.hidden, mixture.inner
    chosen = torch.stack([torch.randperm(num_experts)[: mixture.per_token] for _ in range(tokens)])
    shares = torch.rand(chosen.shape, device=device)
    used = int(chosen.flatten().bincount().count_nonzero())
    chosen = chosen.to(device)

    def make(mix: Callable[..., object]) -> Make:
        def inputs() -> Callable[[], object]:
            x, residual = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(2))
            gate_up = torch.randn(num_experts, 2 * inner, hidden, dtype=dtype, device=device)
            down = torch.randn(num_experts, hidden, inner, dtype=dtype, device=device)
            return lambda: mix(
                residual, x, experts_TA=chosen, shares_TA=shares, gate_up_XWE=gate_up,
                down_XEI=down,
            )  # fmt: skip

        return inputs

    return Case(
        name="mix_experts",
        size=f"{mixture.name}, {tokens} tokens",
        moved=(3 * used * inner + 3 * tokens) * hidden * dtype.itemsize,
        flop=6 * tokens * mixture.per_token * hidden * inner,
        ours=make(mix_experts),
        eager=make(eager_mix_experts),
        eager_capturable=False,
    )


def eager_mix_experts(
    residual_TE: torch.Tensor,
    x_TE: torch.Tensor,
    *,
    experts_TA: torch.Tensor,
    shares_TA: torch.Tensor,
    gate_up_XWE: torch.Tensor,
    down_XEI: torch.Tensor,
) -> torch.Tensor:
    """Expert after expert, each of the tokens that take it."""
    total = torch.zeros_like(x_TE)
    is_taken = functional.one_hot(experts_TA, len(gate_up_XWE)).permute(2, 1, 0)
    for expert in is_taken.sum(dim=(1, 2)).nonzero().flatten().tolist():
        place, token = torch.where(is_taken[expert])
        gate, up = functional.linear(x_TE[token], gate_up_XWE[expert]).chunk(2, dim=-1)
        y = functional.linear(functional.silu(gate) * up, down_XEI[expert])
        total.index_add_(0, token, (y * shares_TA[token, place, None]).to(total.dtype))
    return residual_TE + total
