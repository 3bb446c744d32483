"""Draws with top-k, top-p and min-p without sorting the vocabulary.

A row with a small top-k is drawn among its candidates (kernels/candidates.py). Of others, a token
drawn by Gumbel-max over all ids is also the draw over the kept ids if it is one of them; whether it
is follows from how many ids come before it and how much probability they hold, which is one pass
over the row. If it is not, then nothing behind it is kept either, and the draw is repeated among
the ids before it, with the noise they have. (FlashInfer, arXiv 2501.01005, rejects draws so; it
draws anew in every round.) It does not know penalties.
Shape legend: N rows of scores, V vocabulary, R lines of the tables.
"""

from __future__ import annotations

import torch

from engine_service.kernels.candidates import FEW, Filters, draw_among_best_triton
from engine_service.kernels.jit import INTERPRETED, jit, overlaps_launches, tl
from engine_service.kernels.order import number, ordered
from engine_service.kernels.sampling import draw_tokens_triton, empty_leaders
from engine_service.kernels.streams import Streams
from engine_service.kernels.vocab_tiles import draw_key, gumbel_noise, load_tile, lowest_best

_TILE, _STAGES = 8192, 3
"""One program walks a row alone: 16 logits a thread, and two tiles on their way while it computes
with a third, keep the memory of its multiprocessor busy."""


@jit
def _survey(
    line_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    banned_ptr: tl.tensor,
    key: tl.tensor,
    token: tl.tensor,
    at: tl.tensor,
    base: tl.tensor,
    NUM_BANNED: tl.constexpr,
    HARDWARE_LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """(ids before `token`, their weight, weight of all ids, best score, draw among those before).

    `at` is the token's score; an id comes before it with a higher score, or with an equal one and
    a lower id. Weights are exp(score - base).
    """
    total_G = tl.zeros([BLOCK // 8], tl.float32)
    top_G = tl.full([BLOCK // 8], float("-inf"), tl.float32)
    rank, best, drawn = 0, float("-inf"), 0
    ahead = tl.full([], 0.0, tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        score = load_tile(line_ptr, start, vocab, banned_ptr, NUM_BANNED, BLOCK) * inverse
        before = (score > at) | ((score == at) & (ids < token))
        weight = tl.exp2((score - base) * 1.4426950408889634)
        weight = tl.where(score == score, weight, 0.0)  # NaN is never drawn
        total_G += tl.sum(tl.reshape(weight, (BLOCK // 8, 8)), axis=1)
        top_G = tl.maximum(top_G, tl.max(tl.reshape(score, (BLOCK // 8, 8)), axis=1))
        count = tl.sum(before.to(tl.int32), axis=0)
        # Noise is most of the work, and few tiles hold an id that needs it.
        if count > 0:
            rank += count
            ahead += tl.sum(tl.where(before, weight, 0.0), axis=0)
            noisy = tl.where(before, score + gumbel_noise(ids, key, HARDWARE_LOG), float("-inf"))
            best_here, drawn_here = lowest_best(noisy, ids, vocab)
            if best_here > best:
                best, drawn = best_here, drawn_here
    return rank, ahead, tl.sum(total_G, axis=0), tl.max(top_G, axis=0), drawn


@jit
def _count_at_least(
    line_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    banned_ptr: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    NUM_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """How many scores reach each of three numbers."""
    first_G = tl.zeros([BLOCK // 8], tl.int32)
    second_G = tl.zeros([BLOCK // 8], tl.int32)
    third_G = tl.zeros([BLOCK // 8], tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        score = load_tile(line_ptr, start, vocab, banned_ptr, NUM_BANNED, BLOCK) * inverse
        groups = tl.reshape(score, (BLOCK // 8, 8))
        first_G += tl.sum((groups >= first).to(tl.int32), axis=1)
        second_G += tl.sum((groups >= second).to(tl.int32), axis=1)
        third_G += tl.sum((groups >= third).to(tl.int32), axis=1)
    return tl.sum(first_G, axis=0), tl.sum(second_G, axis=0), tl.sum(third_G, axis=0)


@jit
def _weight_at_least(
    line_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    banned_ptr: tl.tensor,
    bound: tl.tensor,
    base: tl.tensor,
    NUM_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """(how many scores reach `bound`, the sum of their exp(score - base))."""
    count_G = tl.zeros([BLOCK // 8], tl.int32)
    weight_G = tl.zeros([BLOCK // 8], tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        score = load_tile(line_ptr, start, vocab, banned_ptr, NUM_BANNED, BLOCK) * inverse
        groups = tl.reshape(score, (BLOCK // 8, 8))
        weight = tl.where(groups >= bound, tl.exp2((groups - base) * 1.4426950408889634), 0.0)
        count_G += tl.sum((groups >= bound).to(tl.int32), axis=1)
        weight_G += tl.sum(weight, axis=1)
    return tl.sum(count_G, axis=0), tl.sum(weight_G, axis=0)


@jit
def _weight_of_best(
    line_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    banned_ptr: tl.tensor,
    count: tl.tensor,
    at: tl.tensor,
    base: tl.tensor,
    NUM_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """The sum of exp(score - base) over the `count` best ids; the last of them scores at most `at`.

    A search in the order-preserving integers of the scores, two bits a pass: `low` is reached by
    at least `count` scores, `high` by fewer. It ends when they touch or `low` cuts at `count`.
    """
    low, high = tl.full([], -2139095041, tl.int64), ordered(at) + 1  # low is the key of -inf
    at_low = vocab
    # The first pass looks where the count-th best lies in practice: not far below.
    first, second, third = ordered(at - 16.0), ordered(at - 4.0), ordered(at - 1.0)
    while (high - low > 1) & (at_low != count):
        n_first, n_second, n_third = _count_at_least(
            line_ptr, vocab, inverse, banned_ptr,
            number(first), number(second), number(third), NUM_BANNED, BLOCK, STAGES,
        )  # fmt: skip
        if n_third >= count:
            low, at_low = third, n_third
        elif n_second >= count:
            low, high, at_low = second, third, n_second
        elif n_first >= count:
            low, high, at_low = first, second, n_first
        else:
            high = first
        second = (low + high) >> 1
        first, third = (low + second) >> 1, (second + high) >> 1
    bound = tl.where(at_low == count, low, high)
    held, weight = _weight_at_least(
        line_ptr, vocab, inverse, banned_ptr, number(bound), base, NUM_BANNED, BLOCK, STAGES
    )
    equal = tl.exp2((number(low) - base) * 1.4426950408889634)
    return weight + (count - held).to(tl.float32) * equal


@jit
def _redraw_kernel(
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    banned_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    PURPOSE: tl.constexpr,
    NUM_BANNED: tl.constexpr,
    HARDWARE_LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + n)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        key = draw_key(
            tl.load(seed_ptr + row), tl.load(position_ptr + n), tl.load(draw_ptr + n), PURPOSE
        )
        token = tl.load(token_ptr + n).to(tl.int32)
        # Candidates have left nothing to do, unless they were too many.
        if (token < 0) | (top_k == 0) | (top_k > FEW):
            token = _redraw(
                score_ptr + n * stride, vocab, tl.div_rn(1.0, temperature), banned_ptr, key,
                token, tl.minimum(top_k, vocab).to(tl.int32),
                top_p, min_p, NUM_BANNED, HARDWARE_LOG, BLOCK, STAGES,
            )  # fmt: skip
            tl.store(token_ptr + n, token.to(tl.int64))


@jit
def _redraw(
    line_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    banned_ptr: tl.tensor,
    key: tl.tensor,
    token: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    NUM_BANNED: tl.constexpr,
    HARDWARE_LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """The kept id with the best noisy score, from the one on that is best of all ids; -1 where that
    is not drawn yet."""
    at, base = float("-inf"), 0.0
    if token < 0:
        token = vocab  # all ids come before it
    else:
        at = tl.load(line_ptr + token).to(tl.float32) * inverse
        base = at
    weight_of_best = -1.0
    searching = True
    while searching:
        rank, ahead, total, top, drawn = _survey(
            line_ptr, vocab, inverse, banned_ptr, key, token, at, base,
            NUM_BANNED, HARDWARE_LOG, BLOCK, STAGES,
        )  # fmt: skip
        if (top_k > 0) & (top_p < 1.0):
            if (rank > 0) & (rank < top_k) & (weight_of_best < 0.0):
                weight_of_best = _weight_of_best(
                    line_ptr, vocab, inverse, banned_ptr, top_k, at, base, NUM_BANNED, BLOCK, STAGES
                )
            total = weight_of_best
        in_top_k = (top_k == 0) | (rank < top_k)
        in_top_p = (top_p >= 1.0) | (ahead.to(tl.float64) < top_p.to(tl.float64) * total)
        in_min_p = tl.exp2((at - top) * 1.4426950408889634) >= min_p
        searching = (rank > 0) & ((not in_top_k) | (not in_top_p) | (not in_min_p))
        if searching:
            is_first = token == vocab
            token = tl.minimum(drawn, vocab - 1)
            at = tl.load(line_ptr + token).to(tl.float32) * inverse
            # No score exceeds that of a token drawn freely by more than the range of the noise,
            # which is 26.
            base = tl.where(is_first, at, base)
    return tl.minimum(token, vocab - 1)


def draw_filtered_triton(
    scores_NV: torch.Tensor, streams: Streams, filters: Filters, banned_ids: torch.Tensor | None
) -> torch.Tensor:
    """[N] int64: draw_tokens_triton over the ids that a row's filters keep.

    Semantics are those of filters.keep_likely in sampling; top-p compares sums of float32. A row's
    token does not depend on the filters of others.
    """
    num_rows, vocab = scores_NV.shape
    leaders = empty_leaders(scores_NV, filters.top_k)
    token_ids = draw_tokens_triton(scores_NV, streams, banned_ids, leaders=leaders)
    draw_among_best_triton(scores_NV, token_ids, streams, filters, leaders.best, banned_ids)
    overlap = overlaps_launches(scores_NV.device)
    _redraw_kernel[(num_rows,)](
        scores_NV,
        token_ids,
        *streams[:5],
        *filters,
        banned_ids,
        scores_NV.stride(0),
        vocab,
        PURPOSE=int(streams.purpose),
        NUM_BANNED=0 if banned_ids is None else banned_ids.numel(),
        HARDWARE_LOG=not INTERPRETED,
        BLOCK=_TILE,
        STAGES=_STAGES,
        FEW=FEW,
        PDL=overlap,
        num_warps=16,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
    return token_ids
