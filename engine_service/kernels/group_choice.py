"""Which experts tokens take by sigmoid scores among the best groups of experts, and their shares.

The rule is DeepSeek-V3's (arXiv 2412.19437, section 2.1.2). A program is a warp that chooses for
one token: nothing that is compared leaves it. It does not know experts or weights.
Shape legend: T tokens, X experts in N groups of S, A experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton
from engine_service.kernels.order import number
from engine_service.kernels.ranking import best_of, best_places, empty_choice, never, ranked

_TINY = 1e-20
"""Keeps shares finite where all scores have underflowed, as in DeepSeek-V3's published code."""


class GroupRule(NamedTuple):
    """How a token chooses."""

    per_token: int
    num_groups: int
    kept_groups: int
    """Groups that it chooses from: those whose two best biased scores have the largest sum."""
    renormalised: bool
    scale: float


def shares_of(
    scores_TX: torch.Tensor, experts_TA: torch.Tensor, *, renormalised: bool
) -> torch.Tensor:
    """[T, A] the chosen scores; they sum to 1 if renormalised and more than one."""
    shares = scores_TX.gather(1, experts_TA)
    if renormalised and shares.shape[1] > 1:
        shares = shares / (shares.sum(-1, keepdim=True) + _TINY)
    return shares


def choose_experts_ref(
    logits_TX: torch.Tensor, bias_X: torch.Tensor | None, rule: GroupRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, A] int64 experts, best first, [T, A] shares). A score is the logit's sigmoid, to which
    the bias is added for the choice alone; of equal ones the lowest expert comes first."""
    scores = logits_TX.sigmoid()
    choices = scores if bias_X is None else scores + bias_X
    if rule.kept_groups < rule.num_groups:
        groups = choices.unflatten(1, (rule.num_groups, -1))
        best = best_of(groups.topk(2, dim=-1).values.sum(-1), rule.kept_groups)
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        is_kept = kept.unsqueeze(-1).expand_as(groups).flatten(1)
        choices = choices.masked_fill(~is_kept, float("-inf"))
    experts = best_of(choices, rule.per_token)
    return experts, shares_of(scores, experts, renormalised=rule.renormalised) * rule.scale


def choose_experts(
    logits_TX: torch.Tensor, bias_X: torch.Tensor | None, rule: GroupRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_experts_ref`; one launch on CUDA."""
    choose = choose_experts_triton if runs_triton(logits_TX) else choose_experts_ref
    return choose(logits_TX, bias_X, rule)


@jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Of float32, without overflow."""
    shrunk = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, shrunk, 1.0) / (1.0 + shrunk)


@jit
def _in_best_groups(
    key: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tl.tensor:
    """[N S]: whether an expert's group is among the best; `key` [N S] are ranked scores."""
    key = tl.reshape(key, [BLOCK_N, BLOCK_S])
    group = tl.arange(0, BLOCK_N)
    first = tl.max(key, axis=1)
    second = tl.max(tl.where(key == first[:, None], -(1 << 62), key), axis=1)
    both = ranked(number(first >> 16) + number(second >> 16), group)
    both = tl.where(group < NUM_GROUPS, both, -(1 << 62))
    rank = tl.sum((both[None, :] > both[:, None]).to(tl.int32), axis=1)
    rank = tl.broadcast_to(rank[:, None], [BLOCK_N, BLOCK_S])
    return tl.reshape(rank, [BLOCK_N * BLOCK_S]) < KEPT


@jit
def _choose_kernel(
    logit_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    share_ptr: tl.tensor,
    R: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_A: tl.constexpr,
    TINY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N * BLOCK_S)
    group, member = column // BLOCK_S, column % BLOCK_S
    expert = group * SIZE + member
    logit_ptr += token * (R.num_groups * SIZE)
    real = (group < R.num_groups) & (member < SIZE)
    choice = sigmoid(tl.load(logit_ptr + expert, mask=real, other=0.0))
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=real, other=0.0)
    key = ranked(choice, expert)
    if R.kept_groups < R.num_groups:
        key = tl.where(real, key, -(1 << 62))
        kept = _in_best_groups(key, R.num_groups, R.kept_groups, BLOCK_N, BLOCK_S)
        key = tl.where(kept, key, never(expert))
    if kept_ptr is not None:
        line = kept_ptr + token // BLOCK * (R.num_groups * SIZE)
        kept = tl.load(line + expert, mask=real, other=0) != 0
        key = tl.where(kept, key, never(expert))
    chosen = best_places(tl.where(real, key, -(1 << 62)), R.per_token, BLOCK_A)
    place = tl.arange(0, BLOCK_A)
    mask = place < R.per_token
    share = sigmoid(tl.load(logit_ptr + chosen, mask=mask, other=float("-inf")))
    if R.renormalised and R.per_token > 1:
        share = share / (tl.sum(share, axis=0) + TINY)
    place += token * R.per_token
    tl.store(expert_ptr + place, chosen, mask=mask)
    tl.store(share_ptr + place, share * R.scale, mask=mask)


def choose_experts_triton(
    logits_TX: torch.Tensor,
    bias_X: torch.Tensor | None,
    rule: GroupRule,
    *,
    kept_BX: torch.Tensor | None = None,
    block: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_experts_ref` in one launch, of float32; `kept` [T / block, X] int8 are experts that
    tokens of a block may choose, if not all. Exponentials differ from torch's in the last bits,
    and with them the order of scores that differ in no others."""
    num_tokens, num_experts = logits_TX.shape
    size = num_experts // rule.num_groups
    assert size * rule.num_groups == num_experts
    experts, shares = empty_choice(logits_TX, rule.per_token)
    overlap = overlaps_launches(logits_TX.device)
    _choose_kernel[(num_tokens,)](
        logits_TX,
        bias_X,
        kept_BX,
        experts,
        shares,
        rule,
        SIZE=size,
        BLOCK=block,
        BLOCK_N=triton.next_power_of_2(rule.num_groups),
        BLOCK_S=triton.next_power_of_2(size),
        BLOCK_A=triton.next_power_of_2(rule.per_token),
        TINY=_TINY,
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return experts, shares
