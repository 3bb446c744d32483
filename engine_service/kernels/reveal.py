"""What a step of block diffusion does behind its choice of tokens, for every rule: which masked
positions fall, which tokens give way to others, what becomes final.

Plain torch does the same in some 250 launches (decoding/reveal.py with rules.py, unmask.py and
editing.py, which say what it means); here a program does it for one span. It knows the rules by
their codes alone. Positions of a span are consecutive and lie in one block.
Shape legend: N decided positions, R spans, B positions of a block.
"""

from __future__ import annotations

from functools import partial

import torch

from engine_service.kernels.jit import jit, tl, triton
from engine_service.kernels.reveal_rows import (
    Block,
    Choice,
    DecidedSpans,
    Held,
    RowStates,
    RowTokens,
    find_block,
    hold,
)
from engine_service.kernels.reveal_rules import (
    Codes,
    Seen,
    Terms,
    adapt,
    count_falling,
    ranks_of,
    score_of,
    total,
)
from engine_service.kernels.vocab_tiles import draw_key, unit_number

MAX_BLOCK = 128
"""Positions of the longest block: they are compared pair by pair."""


@partial(jit, do_not_specialize=["num_positions"])
def _draws_kernel(
    spans: DecidedSpans,
    states: RowStates,
    draws_ptr: tl.tensor,
    num_positions: tl.tensor,
    B: tl.constexpr,
) -> None:
    block = find_block(spans, states, num_positions)
    for base in range(0, block.count, B):
        place = base + tl.arange(0, B)
        values = tl.zeros([B], tl.int64) + block.taken
        tl.store(draws_ptr + block.first + place, values, mask=place < block.count)


def count_draws_triton(spans: DecidedSpans, states: RowStates) -> torch.Tensor:
    """[N] int64: decisions that were taken in the position's block so far."""
    draws = torch.empty_like(spans.positions)
    _draws_kernel[(len(spans.span_rows),)](spans, states, draws, len(draws), B=32, num_warps=1)
    return draws


@jit
def _see(
    block: Block,
    held: Held,
    masked: tl.tensor,
    rows: RowTokens,
    C: tl.constexpr,
    B: tl.constexpr,
) -> Seen:
    key = draw_key(tl.load(rows.seeds + block.line), held.position, block.taken, C.remask)
    return Seen(
        masked,
        held.probs,
        held.margin,
        -held.entropy,
        unit_number(tl.zeros([B], tl.int32), key),
    )


@jit
def _read_terms(block: Block, states: RowStates, rows: RowTokens, C: tl.constexpr) -> Terms:
    rule, limit = states.rules + block.line * 8, states.limits + block.line * 6
    way, steps, length = tl.load(rule + 1), tl.load(rule + 2), tl.load(rule + 5)
    adapted = tl.load(states.adapted + block.line)
    adapted = tl.where(block.taken == 0, tl.load(limit), adapted)
    return Terms(
        tl.load(rule),
        way,
        tl.minimum(block.start + length - tl.load(rows.prompt_lens + block.line), length),
        steps,
        block.taken,
        tl.load(rule + 3),
        tl.where(way == C.at_most, adapted, tl.load(limit)),
        tl.load(limit + 1),
        tl.load(limit + 2),
        tl.load(limit + 3),
        tl.load(limit + 5),
    )


@partial(jit, do_not_specialize=["num_positions", "mask_id"])
def _reveal_kernel(
    spans: DecidedSpans,
    states: RowStates,
    rows: RowTokens,
    choice: Choice,
    token_ptr: tl.tensor,
    final_ptr: tl.tensor,
    num_positions: tl.tensor,
    table_width: tl.tensor,
    mask_id: tl.tensor,
    C: tl.constexpr,
    B: tl.constexpr,
) -> None:
    block = find_block(spans, states, num_positions)
    held = hold(block, spans, rows, choice, table_width, B)
    least = tl.load(states.limits + block.line * 6 + 4)
    edits = least < float("inf")
    masked = held.is_open & ((held.current == mask_id) | (edits == 0))
    seen = _see(block, held, masked, rows, C, B)
    terms = _read_terms(block, states, rows, C)
    rank = ranks_of(score_of(seen, terms, C, B), B)
    take = masked & (rank < count_falling(seen, terms, rank, C, B))
    num_masked, num_taken = total(masked), total(take)
    # editing.edit: tokens give way to surer ones, and all is final at once when that ends.
    is_surer = (held.token != held.current) & (held.probs.to(tl.float64) > least)
    changed = take | (held.is_open & (masked == 0) & is_surer)
    progress = states.progress + block.line * 3
    num_post = tl.where(block.taken == 0, 0, tl.load(progress + 2))
    num_post = tl.where(num_masked > 0, 0, num_post + 1)
    is_over = (total(changed) == 0) | (num_post >= tl.load(states.rules + block.line * 8 + 6))
    is_done = (num_masked == num_taken) & is_over
    final = (held.is_open == 0) | tl.where(edits, held.is_open & is_done, take)
    told = tl.where(changed, held.token, held.current)
    # All threads have read the line.
    tl.debug_barrier()
    tl.store(token_ptr + held.at, told, mask=held.inside)
    tl.store(final_ptr + held.at, final.to(tl.uint8), mask=held.inside)
    tl.store(rows.tokens + held.own, told, mask=held.inside)
    tl.store(rows.fixed + held.own, final.to(tl.uint8), mask=held.inside)
    tl.store(states.adapted + block.line, adapt(terms.threshold, num_taken, num_masked))
    tl.store(progress, block.taken + 1)
    tl.store(progress + 1, block.start)
    tl.store(progress + 2, num_post)


def reveal_triton(
    spans: DecidedSpans,
    states: RowStates,
    rows: RowTokens,
    choice: Choice,
    *,
    width: int,
    mask_token_id: int,
    codes: Codes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] int64 tokens, [N] bool whether they are final), both written into `rows` too.

    Spans have at most `width` positions, and that is at most `MAX_BLOCK`; of longer ones, which are
    padding, the rest stays unwritten. Thresholds are float64, sums of entropies too; logarithms may
    differ from torch's in their last bits.
    """
    assert width <= MAX_BLOCK, f"blocks of {width} positions"
    block = max(triton.next_power_of_2(width), 4)
    token_ids = torch.empty_like(choice.token_ids)
    final = torch.empty_like(token_ids, dtype=torch.bool)
    _reveal_kernel[(len(spans.span_rows),)](
        spans,
        states,
        rows._replace(fixed=rows.fixed.view(torch.uint8)),
        choice,
        token_ids,
        final.view(torch.uint8),
        len(spans.positions),
        rows.tokens.stride(0),
        mask_token_id,
        C=codes,
        B=block,
        num_warps=8 if block > 64 else 4 if block > 16 else 1,
        # A product and a sum round each for itself, as there.
        enable_fp_fusion=False,
    )
    return token_ids, final
