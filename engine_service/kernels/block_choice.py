"""Which experts tokens take among those that their block of tokens has chosen: LLaDA2.2's rule, by
which a block reads the weights of few experts whatever its tokens want. It does not know experts.
Shape legend: T tokens in B blocks, X experts, A experts of a token.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from engine_service.kernels.group_choice import (
    GroupRule,
    choose_experts_triton,
    shares_of,
    sigmoid,
)
from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton
from engine_service.kernels.ranking import best_of, ranked


class BlockRule(NamedTuple):
    """Tokens of a block choose among `capacity` experts that the block has chosen: those with the
    best biased score in it. What is left over behind the last whole block is one of its own."""

    per_token: int
    block: int
    capacity: int
    renormalised: bool
    scale: float


def choose_in_blocks_ref(
    logits_TX: torch.Tensor, bias_X: torch.Tensor | None, rule: BlockRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_experts_ref` by the rule of blocks."""
    scores = logits_TX.sigmoid()
    choices = scores if bias_X is None else scores + bias_X
    if rule.capacity < choices.shape[1]:
        missing = -len(choices) % rule.block
        whole = functional.pad(choices, (0, 0, 0, missing), value=float("-inf"))
        of_block = whole.unflatten(0, (-1, rule.block)).amax(dim=1)
        kept = torch.zeros_like(of_block, dtype=torch.bool)
        kept.scatter_(1, best_of(of_block, rule.capacity), True)
        is_kept = kept.repeat_interleave(rule.block, dim=0)[: len(choices)]
        choices = choices.masked_fill(~is_kept, float("-inf"))
    experts = best_of(choices, rule.per_token)
    return experts, shares_of(scores, experts, renormalised=rule.renormalised) * rule.scale


def choose_in_blocks(
    logits_TX: torch.Tensor, bias_X: torch.Tensor | None, rule: BlockRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_in_blocks_ref`; two launches on CUDA."""
    choose = choose_in_blocks_triton if runs_triton(logits_TX) else choose_in_blocks_ref
    return choose(logits_TX, bias_X, rule)


@partial(jit, do_not_specialize=["num_tokens"])
def _keep_experts_kernel(
    logit_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program chooses the experts of one block of tokens."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.arange(0, BLOCK_X)
    real = expert < num_experts
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK_T)
    inside = (tl.arange(0, BLOCK_T) < BLOCK) & (token < num_tokens)
    logit_ptrs = logit_ptr + token[:, None] * num_experts + expert[None, :]
    logit = tl.load(logit_ptrs, mask=inside[:, None] & real[None, :], other=float("-inf"))
    # A sigmoid grows with its logit, also when it is rounded.
    best = sigmoid(tl.max(logit, axis=0))
    if bias_ptr is not None:
        best += tl.load(bias_ptr + expert, mask=real, other=0.0)
    key = tl.where(real, ranked(best, expert), -(1 << 62))
    rank = tl.sum((key[:, None] > key[None, :]).to(tl.int32), axis=0)
    kept_ptrs = kept_ptr + tl.program_id(0).to(tl.int64) * num_experts + expert
    tl.store(kept_ptrs, (rank < CAPACITY).to(tl.int8), mask=real)


def choose_in_blocks_triton(
    logits_TX: torch.Tensor, bias_X: torch.Tensor | None, rule: BlockRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_in_blocks_ref` in two launches, of float32; see `choose_experts_triton`."""
    num_tokens, num_experts = logits_TX.shape
    whole = GroupRule(rule.per_token, 1, 1, rule.renormalised, rule.scale)
    if rule.capacity >= num_experts:
        return choose_experts_triton(logits_TX, bias_X, whole)
    num_blocks, overlap = triton.cdiv(num_tokens, rule.block), overlaps_launches(logits_TX.device)
    block_x = triton.next_power_of_2(num_experts)
    kept = logits_TX.new_empty((num_blocks, num_experts), dtype=torch.int8)
    _keep_experts_kernel[(num_blocks,)](
        logits_TX,
        bias_X,
        kept,
        num_tokens,
        num_experts,
        BLOCK=rule.block,
        CAPACITY=rule.capacity,
        BLOCK_T=triton.next_power_of_2(rule.block),
        BLOCK_X=block_x,
        PDL=overlap,
        num_warps=min(32, max(8, block_x**2 // 8192)),  # comparisons of pairs stay in registers
        launch_pdl=overlap,
    )
    return choose_experts_triton(logits_TX, bias_X, whole, kept_BX=kept, block=rule.block)
