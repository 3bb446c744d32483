"""Routers choose what the published classes choose, with the same shares."""

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from engine_service.layers.routing import (
    BlockSigmoidRouter,
    GroupedSigmoidRouter,
    SoftmaxRouter,
)

SOFTMAX = [
    (Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig, {"norm_topk_prob": True}, True),
    (Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig, {"norm_topk_prob": False}, False),
    (OlmoeTopKRouter, transformers.OlmoeConfig, {"norm_topk_prob": False}, False),
    (MixtralTopKRouter, transformers.MixtralConfig, {}, True),
]


def grouped(per_token: int, num_groups: int, kept: int, **changes: object) -> GroupedSigmoidRouter:
    options = {"num_experts": 24, "renormalised": True, "scale": 2.5, "biased": True} | changes
    return GroupedSigmoidRouter(
        per_token=per_token, num_groups=num_groups, kept_groups=kept, **options
    )


def compare(
    got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The same experts with the same shares, in whatever order."""
    for experts, _ in (got, want):
        assert experts.dtype is torch.int64
        assert all(len(set(row)) == len(row) for row in experts.tolist())
    spread = [torch.zeros(len(got[0]), 24).scatter_(1, *one) for one in (got, want)]
    torch.testing.assert_close(*spread, rtol=1e-5, atol=1e-6)
    assert torch.equal(*(experts.sort(-1).values for experts, _ in (got, want)))


@pytest.mark.parametrize(("kind", "config", "options", "renormalised"), SOFTMAX)
@pytest.mark.parametrize("per_token", [1, 2, 8])
def test_softmax(
    kind: type,
    config: type,
    options: dict[str, bool],
    renormalised: bool,
    per_token: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    sizes = {"num_local_experts" if config is transformers.MixtralConfig else "num_experts": 24}
    theirs = kind(config(hidden_size=16, num_experts_per_tok=per_token, **sizes, **options))
    theirs.weight.data.normal_()
    logits, shares, experts = theirs(torch.randn(50, 16))
    ours = SoftmaxRouter(num_experts=24, per_token=per_token, renormalised=renormalised)
    compare(ours(logits.detach()), (experts, shares.detach()))
    other = SoftmaxRouter(num_experts=24, per_token=per_token, renormalised=not renormalised)
    assert not torch.allclose(other(logits)[1].sum(-1), shares.sum(-1)), "negative control"


@pytest.mark.parametrize(("per_token", "num_groups", "kept"), [(2, 8, 4), (6, 4, 2), (3, 1, 1)])
@pytest.mark.parametrize("renormalised", [True, False])
def test_grouped_sigmoid(
    per_token: int, num_groups: int, kept: int, renormalised: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    config = transformers.DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=24,
        num_experts_per_tok=per_token,
        n_group=num_groups,
        topk_group=kept,
        norm_topk_prob=renormalised,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.data.normal_()
    theirs.e_score_correction_bias.normal_(0.0, 0.3)
    logits, shares, experts = (tensor.detach() for tensor in theirs(torch.randn(80, 16)))
    ours = grouped(per_token, num_groups, kept, renormalised=renormalised)
    compare(ours(logits, theirs.e_score_correction_bias), (experts, shares))
    unbiased = ours(logits)[0].sort(-1).values
    assert not torch.equal(unbiased, experts.sort(-1).values), "negative control"


def test_the_limit_of_groups_matters(seed: int) -> None:
    """The best expert of all is out of reach when its group is weak otherwise."""
    torch.manual_seed(seed)
    logits = torch.randn(1, 24) * 0.1
    logits[0, :3] = torch.tensor([4.0, -9.0, -9.0])
    logits[0, 3:12] = 1.0
    limited, free = grouped(2, 8, 2), grouped(2, 8, 8)
    assert 0 not in limited(logits)[0]
    assert 0 in free(logits)[0]


def by_block(capacity: int, **changes: object) -> BlockSigmoidRouter:
    options = {"num_experts": 24, "per_token": 3, "block": 4, "renormalised": True, "scale": 2.5}
    return BlockSigmoidRouter(capacity=capacity, biased=True, **(options | changes))


@pytest.mark.parametrize("capacity", [3, 7, 24])
@pytest.mark.parametrize("num_tokens", [8, 11, 2])
def test_the_tokens_of_a_block_share_few_experts(capacity: int, num_tokens: int, seed: int) -> None:
    """Against one token after the other; a last block may be short."""
    torch.manual_seed(seed)
    # Few values, so that many scores tie.
    logits, bias = torch.randint(-2, 3, (num_tokens, 24)).float(), torch.randn(24) * 0.3
    experts, shares = by_block(capacity)(logits, bias)
    for start in range(0, num_tokens, 4):
        own = (logits[start : start + 4].sigmoid() + bias).tolist()
        best = [max(column) for column in zip(*own, strict=True)]
        pool = sorted(range(24), key=lambda expert: (-best[expert], expert))[:capacity]
        for token, row in enumerate(own, start):
            chosen = sorted(pool, key=lambda expert: (-row[expert], expert))[:3]
            assert experts[token].tolist() == chosen
            scores = logits[token].sigmoid()[chosen]
            torch.testing.assert_close(shares[token], scores / scores.sum() * 2.5)
    if capacity == 24:
        free = grouped(3, 1, 1)(logits, bias)
        compare((experts, shares), free)
    elif capacity == 3:
        assert not torch.equal(
            experts.sort(-1).values, grouped(3, 1, 1)(logits, bias)[0].sort(-1).values
        )


def test_one_expert_of_a_token_keeps_its_score() -> None:
    """As in the published class, a single share is not normalised to 1."""
    _, shares = grouped(1, 1, 1)(torch.zeros(1, 24))
    assert shares.tolist() == [[1.25]]


@pytest.mark.parametrize("num_experts", [24, 300])
def test_equal_scores_go_to_the_lowest_expert(num_experts: int) -> None:
    logits = torch.zeros(3, num_experts)
    logits[1, num_experts - 1] = 1.0
    softmax = SoftmaxRouter(num_experts=num_experts, per_token=3, renormalised=True)
    sigmoid = grouped(3, 4, 2, num_experts=num_experts)
    assert softmax(logits)[0].tolist() == [[0, 1, 2], [num_experts - 1, 0, 1], [0, 1, 2]]
    assert sigmoid(logits)[0].tolist() == [[0, 1, 2], [num_experts - 1, 0, 1], [0, 1, 2]]


def test_shares_stay_finite_where_scores_underflow() -> None:
    experts, shares = grouped(2, 4, 2)(torch.full((1, 24), -300.0))
    assert experts.tolist() == [[0, 1]]
    assert shares.isfinite().all()
