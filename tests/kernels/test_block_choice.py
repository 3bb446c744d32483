"""Tokens choose among their block's experts, as a loop over blocks does, over sizes and ties."""

from __future__ import annotations

import math

import pytest
import torch

from engine_service.kernels.block_choice import (
    BlockRule,
    choose_in_blocks_ref,
    choose_in_blocks_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = torch.tensor([-3.0, -1.3, 0.4, 2.2])
"""Logits whose sigmoids and exponentials differ."""
IN_BLOCKS = {"torch": choose_in_blocks_ref, "triton": choose_in_blocks_triton}
BLOCK_RULES = [
    (256, BlockRule(8, 32, 48, True, 2.5)),
    (300, BlockRule(8, 8, 20, True, 1.0)),
    (24, BlockRule(3, 4, 5, True, 1.0)),
    (21, BlockRule(4, 6, 2, False, 0.5)),
    (6, BlockRule(2, 4, 6, True, 1.0)),
]
"""One has room for fewer experts than a token takes, one for all."""


@pytest.mark.parametrize("way", IN_BLOCKS)
@pytest.mark.parametrize(("num_experts", "rule"), BLOCK_RULES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 32, 71])
def test_tokens_choose_among_what_their_block_has_chosen(
    way: str, num_experts: int, rule: BlockRule, num_tokens: int, seed: int
) -> None:
    """Logits out of few values, so that experts tie; whole blocks and what is left over."""
    torch.manual_seed(seed)
    logits = FEW[torch.randint(len(FEW), (num_tokens, num_experts))]
    bias = torch.tensor([0.0, 0.17])[torch.randint(2, (num_experts,))]
    experts, shares = IN_BLOCKS[way](logits.to(DEVICE), bias.to(DEVICE), rule)
    every = range(num_experts)
    for start in range(0, num_tokens, rule.block):
        block = logits[start : start + rule.block]
        scores = [[1 / (1 + math.exp(-x)) for x in row] for row in block.tolist()]
        choices = [[round(row[x] + float(bias[x]), 6) for x in every] for row in scores]
        best = [max(row[x] for row in choices) for x in every]
        kept = sorted(every, key=lambda x, best=best: (-best[x], x))[: rule.capacity]
        for token, (own, choice) in enumerate(zip(scores, choices, strict=True), start):
            order = sorted(kept, key=lambda x, choice=choice: (-choice[x], x))
            order += [x for x in every if x not in kept]
            chosen = order[: rule.per_token]
            whole = sum(own[x] for x in chosen) if rule.renormalised else 1.0
            assert experts[token].tolist() == chosen
            parts = [own[x] / whole * rule.scale for x in chosen]
            assert shares[token].tolist() == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize(("num_experts", "rule"), BLOCK_RULES, ids=str)
def test_the_kernels_choose_in_blocks_what_plain_torch_chooses(
    num_experts: int, rule: BlockRule, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(77, num_experts, device=DEVICE) * 2
    for bias in (None, torch.randn(num_experts, device=DEVICE) * 0.2):
        want = choose_in_blocks_ref(logits, bias, rule)
        got = choose_in_blocks_triton(logits, bias, rule)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=0)
        if rule.capacity < num_experts:
            free = choose_in_blocks_triton(logits, bias, rule._replace(capacity=num_experts))
            assert not torch.equal(free[0], want[0]), "the control: experts are limited"
