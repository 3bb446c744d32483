"""Which experts tokens take and their shares: by sigmoid scores among the best groups of experts,
which is DeepSeek-V3's rule (arXiv 2412.19437, section 2.1.2), or the most likely of a softmax.

It does not know experts or weights.
Shape legend: T tokens, X experts in N groups of S, A experts of a token.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton
from engine_service.kernels.order import number, ordered

_TINY = 1e-20
"""Keeps shares finite where all scores have underflowed, as in DeepSeek-V3's published code."""
_TOKENS = 4
"""Tokens of a program."""


class GroupRule(NamedTuple):
    """How a token chooses."""

    per_token: int
    num_groups: int
    kept_groups: int
    """Groups that it chooses from: those whose two best biased scores have the largest sum."""
    renormalised: bool
    scale: float


class SoftmaxRule(NamedTuple):
    """The most likely experts. Their shares are probabilities, or sum to 1 if renormalised."""

    per_token: int
    renormalised: bool


def best_of(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count] int64 places of the highest scores, highest first; of equals the lowest place."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]


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


def choose_likely_ref(
    logits_TX: torch.Tensor, rule: SoftmaxRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, A] int64 experts, best first, [T, A] shares); of equal ones the lowest comes first."""
    probabilities = logits_TX.softmax(-1)
    experts = best_of(probabilities, rule.per_token)
    shares = probabilities.gather(1, experts)
    if rule.renormalised:
        shares = shares / shares.sum(-1, keepdim=True)
    return experts, shares


def choose_likely(logits_TX: torch.Tensor, rule: SoftmaxRule) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_likely_ref`; one launch on CUDA."""
    choose = choose_likely_triton if runs_triton(logits_TX) else choose_likely_ref
    return choose(logits_TX, rule)


@jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    shrunk = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, shrunk, 1.0) / (1.0 + shrunk)


@jit
def _ranked(x: tl.tensor, place: tl.tensor) -> tl.tensor:
    """int64 keys, all different, in the order of the numbers; of equals the lowest place leads."""
    return (ordered(tl.where(x == 0.0, 0.0, x)) << 16) | (0xFFFF - place)


@jit
def _in_best_groups(
    key: tl.tensor, group: tl.tensor, NUM_GROUPS: tl.constexpr, KEPT: tl.constexpr
) -> tl.tensor:
    """[T, N, 1]: whether a group is among the best; `key` [T, N, S] are ranked scores."""
    first = tl.max(key, axis=2)
    second = tl.max(tl.where(key == first[:, :, None], -(1 << 62), key), axis=2)
    both = _ranked(number(first >> 16) + number(second >> 16), group)
    both = tl.where(group < NUM_GROUPS, both, -(1 << 62))
    rank = tl.sum((both[:, None, :] > both[:, :, None]).to(tl.int32), axis=2)
    return (rank < KEPT)[:, :, None]


@partial(jit, do_not_specialize=["num_tokens"])
def _choose_kernel(
    logit_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    share_ptr: tl.tensor,
    num_tokens: tl.tensor,
    R: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_A: tl.constexpr,
    TINY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    group, member = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_S)[None, None, :]
    expert = group[:, :, None] * SIZE + member
    lines = logit_ptr + token * (R.num_groups * SIZE)
    real = (group[:, :, None] < R.num_groups) & (member < SIZE)
    inside = real & (token < num_tokens)[:, None, None]
    choice = _sigmoid(tl.load(lines[:, None, None] + expert, mask=inside, other=0.0))
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=real, other=0.0)
    key = _ranked(choice, expert)
    if R.kept_groups < R.num_groups:
        key = tl.where(real, key, -(1 << 62))
        kept = _in_best_groups(key, group, R.num_groups, R.kept_groups)
        never = tl.full([BLOCK_T, BLOCK_N, BLOCK_S], float("-inf"), tl.float32)
        key = tl.where(kept, key, _ranked(never, expert))
    key = tl.where(real, key, -(1 << 62))
    column = tl.arange(0, BLOCK_A)[None, :]
    chosen = tl.zeros([BLOCK_T, BLOCK_A], tl.int64)
    PER_TOKEN: tl.constexpr = R.per_token
    for index in tl.static_range(PER_TOKEN):
        best = tl.max(tl.max(key, axis=2), axis=1)
        chosen = tl.where(column == index, (0xFFFF - (best & 0xFFFF))[:, None], chosen)
        key = tl.where(key == best[:, None, None], -(1 << 62), key)
    mask = (column < R.per_token) & (token < num_tokens)[:, None]
    share = _sigmoid(tl.load(lines[:, None] + chosen, mask=mask, other=float("-inf")))
    if R.renormalised and R.per_token > 1:
        share = share / (tl.sum(share, axis=1) + TINY)[:, None]
    place = token[:, None] * R.per_token + column
    tl.store(expert_ptr + place, chosen, mask=mask)
    tl.store(share_ptr + place, share * R.scale, mask=mask)


def choose_experts_triton(
    logits_TX: torch.Tensor, bias_X: torch.Tensor | None, rule: GroupRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_experts_ref` in one launch, of float32. Exponentials differ from torch's in the last
    bits, and with them the order of scores that differ in no others."""
    num_tokens, num_experts = logits_TX.shape
    size = num_experts // rule.num_groups
    assert logits_TX.dtype is torch.float32
    assert logits_TX.is_contiguous()
    assert size * rule.num_groups == num_experts <= 0xFFFF
    shape = (num_tokens, rule.per_token)
    experts = torch.empty(shape, dtype=torch.int64, device=logits_TX.device)
    shares = logits_TX.new_empty(shape)
    overlap = overlaps_launches(logits_TX.device)
    _choose_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        logits_TX,
        bias_X,
        experts,
        shares,
        num_tokens,
        rule,
        SIZE=size,
        BLOCK_T=_TOKENS,
        BLOCK_N=triton.next_power_of_2(rule.num_groups),
        BLOCK_S=triton.next_power_of_2(size),
        BLOCK_A=triton.next_power_of_2(rule.per_token),
        TINY=_TINY,
        PDL=overlap,
        launch_pdl=overlap,
    )
    return experts, shares


@partial(jit, do_not_specialize=["num_tokens"])
def _choose_likely_kernel(
    logit_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    share_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = (token < num_tokens)[:, None]
    expert = tl.arange(0, BLOCK_X)[None, :]
    real = expert < num_experts
    lines = logit_ptr + token[:, None] * num_experts
    logit = tl.load(lines + expert, mask=real & is_token, other=0.0)
    logit = tl.where(real, logit, float("-inf"))
    top = tl.max(logit, axis=1)[:, None]
    total = tl.sum(tl.exp(logit - top), axis=1)[:, None]
    key = tl.where(real, _ranked(tl.exp(logit - top) / total, expert), -(1 << 62))
    column = tl.arange(0, BLOCK_A)[None, :]
    chosen = tl.zeros([BLOCK_T, BLOCK_A], tl.int64)
    PER_TOKEN: tl.constexpr = R.per_token
    for index in tl.static_range(PER_TOKEN):
        best = tl.max(key, axis=1)
        chosen = tl.where(column == index, (0xFFFF - (best & 0xFFFF))[:, None], chosen)
        key = tl.where(key == best[:, None], -(1 << 62), key)
    mask = (column < R.per_token) & is_token
    share = tl.exp(tl.load(lines + chosen, mask=mask, other=float("-inf")) - top) / total
    if R.renormalised:
        share = share / tl.where(is_token, tl.sum(share, axis=1)[:, None], 1.0)
    place = token[:, None] * R.per_token + column
    tl.store(expert_ptr + place, chosen, mask=mask)
    tl.store(share_ptr + place, share, mask=mask)


def choose_likely_triton(
    logits_TX: torch.Tensor, rule: SoftmaxRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_likely_ref` in one launch, of float32; see `choose_experts_triton`."""
    num_tokens, num_experts = logits_TX.shape
    assert logits_TX.dtype is torch.float32
    assert logits_TX.is_contiguous()
    assert num_experts <= 0xFFFF
    shape = (num_tokens, rule.per_token)
    experts = torch.empty(shape, dtype=torch.int64, device=logits_TX.device)
    shares = logits_TX.new_empty(shape)
    overlap = overlaps_launches(logits_TX.device)
    _choose_likely_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        logits_TX,
        experts,
        shares,
        num_tokens,
        num_experts,
        rule,
        BLOCK_T=_TOKENS,
        BLOCK_X=triton.next_power_of_2(num_experts),
        BLOCK_A=triton.next_power_of_2(rule.per_token),
        PDL=overlap,
        launch_pdl=overlap,
    )
    return experts, shares
