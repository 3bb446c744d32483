"""A draw among the best few ids of a row, found without reading the row again.

What drew over all ids leaves the best score of every group of 32. The k-th best of these leaders is
reached by at least k ids, so groups whose leaders do not reach it hold none of the k best. A few
thousand numbers say which groups these are, and what remains fits in registers: top-k, top-p and
min-p are decided there. It does not know penalties.
Shape legend: N rows of scores, V vocabulary, R lines of the tables, G leaders, S groups that may
hold candidates, C = 32 S of these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_service.kernels.jit import INTERPRETED, jit, overlaps_launches, tl, triton
from engine_service.kernels.order import number, ordered
from engine_service.kernels.streams import Streams
from engine_service.kernels.vocab_tiles import draw_key, exp_below, gumbel_noise, lowest_best

GROUP = 32
FEW = 64
"""Largest top-k that is drawn so; models recommend 20 to 64."""
MOST_GROUPS = 128
"""More than must be kept, so that one of many bounds will do, which takes fewer passes to find."""


class Filters(NamedTuple):
    """Lines of the tables, each [R]."""

    top_k: torch.Tensor
    """int64; 0 is off."""
    top_p: torch.Tensor
    """float32; 1 is off."""
    min_p: torch.Tensor
    """float32; 0 is off."""


@jit
def _candidates_kernel(
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
    leader_ptr: tl.tensor,
    place_ptr: tl.tensor,
    num_leaders: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    PURPOSE: tl.constexpr,
    NUM_BANNED: tl.constexpr,
    HARDWARE_LOG: tl.constexpr,
    LEADERS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    if tl.load(token_ptr + n) < 0:
        row = tl.load(row_ptr + n)
        key = draw_key(
            tl.load(seed_ptr + row), tl.load(position_ptr + n), tl.load(draw_ptr + n), PURPOSE
        )
        token = _draw_among_best(
            score_ptr + n * stride, leader_ptr + n * num_leaders, place_ptr + n * GROUPS,
            num_leaders, vocab, tl.div_rn(1.0, tl.load(temperature_ptr + row)), banned_ptr, key,
            tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row),
            tl.load(min_p_ptr + row), NUM_BANNED, HARDWARE_LOG, LEADERS, GROUPS, SIZE,
        )  # fmt: skip
        tl.store(token_ptr + n, token.to(tl.int64))


@jit
def _draw_among_best(
    line_ptr: tl.tensor,
    leader_ptr: tl.tensor,
    place_ptr: tl.tensor,
    num_leaders: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    banned_ptr: tl.tensor,
    key: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    NUM_BANNED: tl.constexpr,
    HARDWARE_LOG: tl.constexpr,
    LEADERS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The kept id with the best noisy score; -1 where nothing is allowed, or more groups than fit
    have leaders that are equal to the k-th best.

    `place_ptr` [S] int32 is scratch of this row alone.
    """
    place = tl.arange(0, LEADERS)
    leader = tl.load(leader_ptr + place, mask=place < num_leaders, other=float("-inf"))
    top = tl.max(leader, axis=0)
    low = tl.full([], -2139095040, tl.int64)  # the lowest finite number
    reach = tl.sum((leader >= number(low)).to(tl.int32), axis=0)
    # The k best of a language model's scores lie not far below the first.
    low, _, reach = _narrow(
        leader, low, ordered(top) + 1, reach, top_k, GROUPS,
        ordered(top - 16.0), ordered(top - 4.0), ordered(top - 1.0),
    )  # fmt: skip
    token = tl.full([], -1, tl.int32)
    if (reach > 0) & (reach <= GROUPS):
        is_kept = leader >= number(low)
        slot = tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
        tl.store(place_ptr + slot, place, mask=is_kept)
        tl.debug_barrier()
        x, ids = _gather(line_ptr, place_ptr, reach, vocab, banned_ptr, NUM_BANNED, GROUPS, SIZE)
        token = _draw_kept(
            x * inverse, ids, line_ptr, vocab, inverse, key, low, top, top_k, top_p, min_p,
            HARDWARE_LOG,
        )  # fmt: skip
    return token


@jit
def _gather(
    line_ptr: tl.tensor,
    place_ptr: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    banned_ptr: tl.tensor,
    NUM_BANNED: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """(logits [C] float32, ids [C]) of the first `count` groups; others, and banned ids, are
    -inf."""
    slot = tl.arange(0, GROUPS)
    first = tl.load(place_ptr + slot, mask=slot < count, other=0) * SIZE
    ids = first[:, None] + tl.arange(0, SIZE)[None, :]
    is_there = (slot < count)[:, None] & (ids < vocab)
    x = tl.load(line_ptr + ids, mask=is_there, other=float("-inf")).to(tl.float32)
    for index in tl.static_range(NUM_BANNED):
        x = tl.where(ids == tl.load(banned_ptr + index), float("-inf"), x)
    return tl.reshape(x, (GROUPS * SIZE,)), tl.reshape(ids, (GROUPS * SIZE,))


@jit
def _draw_kept(
    score: tl.tensor,
    ids: tl.tensor,
    line_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    key: tl.tensor,
    low: tl.tensor,
    top: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    HARDWARE_LOG: tl.constexpr,
) -> tl.tensor:
    """The id [C] that is kept and has the best noisy score. At least the k best, or all that are
    allowed, reach `low`."""
    high = ordered(top) + 1
    reach = tl.sum((score >= number(low)).to(tl.int32), axis=0)
    second = (low + high) >> 1
    low, high, reach = _narrow(
        score, low, high, reach, top_k, top_k,
        (low + second) >> 1, second, (second + high) >> 1,
    )  # fmt: skip
    weight = exp_below(score, top)
    # Of equals at the bound only the first belong to the k best, and all weigh the same.
    are_all_kept = reach <= top_k
    bound = tl.where(are_all_kept, low, high)
    total = tl.sum(tl.where(score >= number(bound), weight, 0.0), axis=0)
    held = tl.sum((score >= number(bound)).to(tl.int32), axis=0)
    equal = exp_below(number(tl.where(are_all_kept, high - 1, low)), top)
    total += tl.where(are_all_kept, 0.0, (top_k - held).to(tl.float32) * equal)
    noisy = tl.where(
        score >= number(low), score + gumbel_noise(ids, key, HARDWARE_LOG), float("-inf")
    )
    token = -1
    searching = True
    while searching:
        _, token = lowest_best(noisy, ids, vocab)
        at = tl.load(line_ptr + token).to(tl.float32) * inverse
        before = (score > at) | ((score == at) & (ids < token))
        rank = tl.sum(before.to(tl.int32), axis=0)
        ahead = tl.sum(tl.where(before, weight, 0.0), axis=0)
        in_top_p = (top_p >= 1.0) | (ahead.to(tl.float64) < top_p.to(tl.float64) * total)
        in_min_p = exp_below(at, top) >= min_p
        # What is not kept has nothing kept behind it: the draw is repeated among those before.
        searching = (rank > 0) & ((rank >= top_k) | (not in_top_p) | (not in_min_p))
        noisy = tl.where(before, noisy, float("-inf"))
    return token


@jit
def _narrow(
    x: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    reach: tl.tensor,
    least: tl.tensor,
    enough: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
) -> tl.tensor:
    """(key, the lowest one known to be too high, how many `x` reach the key): of keys that `least`
    numbers reach, one that no more than `enough` do, or the highest.

    `low` is such a key, reached by `reach`, or by all there are; `high` is none. Two bits a pass,
    from the keys `first` to `third` on; the three counts are summed as one number.
    """
    while (high - low > 1) & (reach > enough):
        counts = (x >= number(first)).to(tl.int64)
        counts += (x >= number(second)).to(tl.int64) << 20
        counts += (x >= number(third)).to(tl.int64) << 40
        total = tl.sum(counts, axis=0)
        at_first = (total & 0xFFFFF).to(tl.int32)
        at_second = ((total >> 20) & 0xFFFFF).to(tl.int32)
        at_third = (total >> 40).to(tl.int32)
        if at_third >= least:
            low, reach = third, at_third
        elif at_second >= least:
            low, high, reach = second, third, at_second
        elif at_first >= least:
            low, high, reach = first, second, at_first
        else:
            high = first
        second = (low + high) >> 1
        first, third = (low + second) >> 1, (second + high) >> 1
    return low, high, reach


def draw_among_best_triton(
    scores_NV: torch.Tensor,
    token_ids: torch.Tensor,
    streams: Streams,
    filters: Filters,
    leaders_NG: torch.Tensor,
    banned_ids: torch.Tensor | None,
) -> None:
    """Replaces the tokens [N] that are -1 by draws over the ids that their rows' filters keep,
    unless too many are equal to be candidates: those stay -1.

    `leaders` are those that sampling.draw_tokens_triton wrote for such rows, whose top-k is at most
    FEW.
    """
    (num_rows, vocab), num_leaders = scores_NV.shape, leaders_NG.shape[1]
    places = torch.empty(num_rows, MOST_GROUPS, dtype=torch.int32, device=scores_NV.device)
    overlap = overlaps_launches(scores_NV.device)
    _candidates_kernel[(num_rows,)](
        scores_NV,
        token_ids,
        *streams[:5],
        *filters,
        banned_ids,
        leaders_NG,
        places,
        num_leaders,
        scores_NV.stride(0),
        vocab,
        PURPOSE=int(streams.purpose),
        NUM_BANNED=0 if banned_ids is None else banned_ids.numel(),
        HARDWARE_LOG=not INTERPRETED,
        LEADERS=triton.next_power_of_2(num_leaders),
        GROUPS=MOST_GROUPS,
        SIZE=GROUP,
        PDL=overlap,
        num_warps=16,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
