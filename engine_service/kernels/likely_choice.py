"""Which experts tokens take by a softmax over all of them: the most likely. It does not know
experts or weights.
Shape legend: T tokens, X experts, A experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton
from engine_service.kernels.ranking import best_of, best_places, empty_choice, ranked


class SoftmaxRule(NamedTuple):
    """The most likely experts. Their shares are probabilities, or sum to 1 if renormalised."""

    per_token: int
    renormalised: bool


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
def _choose_likely_kernel(
    logit_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    share_ptr: tl.tensor,
    num_experts: tl.tensor,
    R: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_X)
    real = expert < num_experts
    logit_ptr += token * num_experts
    logit = tl.load(logit_ptr + expert, mask=real, other=float("-inf"))
    top = tl.max(logit, axis=0)
    total = tl.sum(tl.exp(logit - top), axis=0)
    key = tl.where(real, ranked(tl.exp(logit - top) / total, expert), -(1 << 62))
    chosen = best_places(key, R.per_token, BLOCK_A)
    place = tl.arange(0, BLOCK_A)
    mask = place < R.per_token
    share = tl.exp(tl.load(logit_ptr + chosen, mask=mask, other=float("-inf")) - top) / total
    if R.renormalised:
        share = share / tl.sum(share, axis=0)
    place += token * R.per_token
    tl.store(expert_ptr + place, chosen, mask=mask)
    tl.store(share_ptr + place, share, mask=mask)


def choose_likely_triton(
    logits_TX: torch.Tensor, rule: SoftmaxRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_likely_ref` in one launch, of float32; see `choose_experts_triton`."""
    num_tokens, num_experts = logits_TX.shape
    experts, shares = empty_choice(logits_TX, rule.per_token)
    overlap = overlaps_launches(logits_TX.device)
    _choose_likely_kernel[(num_tokens,)](
        logits_TX,
        experts,
        shares,
        num_experts,
        rule,
        BLOCK_X=triton.next_power_of_2(num_experts),
        BLOCK_A=triton.next_power_of_2(rule.per_token),
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return experts, shares
