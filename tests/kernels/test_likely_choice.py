"""The most likely experts are those of a softmax that is written out, over sizes and ties."""

from __future__ import annotations

import math

import pytest
import torch

from engine_service.kernels.likely_choice import (
    SoftmaxRule,
    choose_likely_ref,
    choose_likely_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = torch.tensor([-3.0, -1.3, 0.4, 2.2])
"""Logits whose sigmoids and exponentials differ."""
LIKELY = {"torch": choose_likely_ref, "triton": choose_likely_triton}
SOFTMAX_RULES = [
    (128, SoftmaxRule(8, True)),
    (8, SoftmaxRule(2, True)),
    (60, SoftmaxRule(4, False)),
    (5, SoftmaxRule(1, True)),
    (6, SoftmaxRule(6, False)),
]


@pytest.mark.parametrize("way", LIKELY)
@pytest.mark.parametrize(("num_experts", "rule"), SOFTMAX_RULES, ids=str)
def test_of_equally_likely_experts_the_lowest(
    way: str, num_experts: int, rule: SoftmaxRule, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = FEW[torch.randint(len(FEW), (7, num_experts))]
    experts, shares = LIKELY[way](logits.to(DEVICE), rule)
    assert experts.dtype is torch.int64
    for token, row in enumerate(logits.tolist()):
        chosen = sorted(range(num_experts), key=lambda expert: (-row[expert], expert))
        chosen = chosen[: rule.per_token]
        parts = [math.exp(row[expert]) for expert in chosen]
        whole = sum(parts) if rule.renormalised else sum(map(math.exp, row))
        assert experts[token].tolist() == chosen
        assert shares[token].tolist() == pytest.approx([part / whole for part in parts], rel=1e-5)


@pytest.mark.parametrize(("num_experts", "rule"), SOFTMAX_RULES, ids=str)
@pytest.mark.parametrize("scale", [2.0, 60.0])
def test_the_kernel_finds_the_most_likely_that_plain_torch_finds(
    num_experts: int, rule: SoftmaxRule, scale: float, seed: int
) -> None:
    """Nearly all of them underflow at the larger scale."""
    torch.manual_seed(seed)
    logits = torch.randn(33, num_experts, device=DEVICE) * scale
    want = choose_likely_ref(logits, rule)
    got = choose_likely_triton(logits, rule)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-30)
    other = choose_likely_triton(logits.roll(1, 0), rule)
    assert not torch.equal(other[0], want[0]), "the control"
    if scale < 10 and rule.per_token not in (1, num_experts):
        otherwise = choose_likely_triton(logits, rule._replace(renormalised=not rule.renormalised))
        assert not torch.allclose(otherwise[1], want[1], rtol=1e-5, atol=1e-30), "the control"
