"""Experts are those that a loop over tokens chooses, with its shares, over groupings and ties."""

from __future__ import annotations

import math

import pytest
import torch

from engine_service.kernels.group_choice import (
    GroupRule,
    choose_experts_ref,
    choose_experts_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = {"torch": choose_experts_ref, "triton": choose_experts_triton}
ways = pytest.mark.parametrize("way", WAYS)
FEW = torch.tensor([-3.0, -1.3, 0.4, 2.2])
"""Logits whose sigmoids have different sums of two, with biases or without."""


def wanted(
    logits: list[float], bias: list[float], rule: GroupRule
) -> tuple[list[int], list[float]]:
    """Of one token."""
    size = len(logits) // rule.num_groups
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    choices = [score + own for score, own in zip(scores, bias, strict=True)]
    members = [list(range(g * size, (g + 1) * size)) for g in range(rule.num_groups)]

    def best_two(group: int) -> float:
        return sum(sorted(round(choices[expert], 6) for expert in members[group])[-2:])

    kept = list(range(rule.num_groups))
    if rule.kept_groups < rule.num_groups:
        kept.sort(key=lambda group: (-round(best_two(group), 5), group))
    pool = [expert for group in kept[: rule.kept_groups] for expert in members[group]]
    pool.sort(key=lambda expert: (-round(choices[expert], 6), expert))
    chosen = pool[: rule.per_token]
    shares = [scores[expert] for expert in chosen]
    if rule.renormalised and len(shares) > 1:
        shares = [share / sum(shares) for share in shares]
    return chosen, [share * rule.scale for share in shares]


RULES = [
    (256, GroupRule(8, 8, 4, True, 2.5)),
    (24, GroupRule(3, 4, 2, True, 2.5)),
    (24, GroupRule(1, 1, 1, True, 1.0)),
    (21, GroupRule(4, 3, 2, False, 0.5)),
]


@ways
@pytest.mark.parametrize(("num_experts", "rule"), RULES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_of_equal_scores_the_lowest_expert(
    way: str, num_experts: int, rule: GroupRule, biased: bool, seed: int
) -> None:
    """Logits out of few values, so that experts and groups tie; a last program that is not full."""
    torch.manual_seed(seed)
    logits = FEW[torch.randint(len(FEW), (7, num_experts))]
    bias = torch.tensor([0.0, 0.17])[torch.randint(2, (num_experts,))]
    given = bias.to(DEVICE) if biased else None
    experts, shares = WAYS[way](logits.to(DEVICE), given, rule)
    assert experts.dtype is torch.int64
    for token, row in enumerate(logits.tolist()):
        own = bias.tolist() if biased else [0.0] * num_experts
        chosen, parts = wanted(row, own, rule)
        assert experts[token].tolist() == chosen
        assert shares[token].tolist() == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize(("num_experts", "rule"), RULES, ids=str)
def test_the_kernel_chooses_what_plain_torch_chooses(
    num_experts: int, rule: GroupRule, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(33, num_experts, device=DEVICE) * 2
    bias = torch.randn(num_experts, device=DEVICE) * 0.2
    want = choose_experts_ref(logits, bias, rule)
    got = choose_experts_triton(logits, bias, rule)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=0)
    assert not torch.equal(choose_experts_triton(logits, None, rule)[0], want[0]), "the control"
    if rule.kept_groups < rule.num_groups:
        free = choose_experts_triton(logits, bias, rule._replace(kept_groups=rule.num_groups))
        assert not torch.equal(free[0], want[0]), "the control: groups are limited"


@ways
def test_more_experts_than_the_groups_have_and_scores_that_underflow(way: str) -> None:
    """What is left is taken in order, as where nothing can be chosen; nobody is taken twice."""
    logits = torch.full((1, 6), -300.0, device=DEVICE)
    logits[0, 4:] = 1.0
    experts, shares = WAYS[way](logits, None, GroupRule(5, 3, 1, True, 1.0))
    assert experts.tolist() == [[4, 5, 0, 1, 2]]
    assert shares[0].tolist() == pytest.approx([0.5, 0.5, 0, 0, 0])
    logits.fill_(-300.0)
    experts, shares = WAYS[way](logits, None, GroupRule(2, 3, 1, True, 1.0))
    assert experts.tolist() == [[0, 1]]
    assert shares.isfinite().all()
