"""Chooses the keys that a sparse cache keeps, and moves them into the row's pages.

Those outside of a hole that its queries attend to most, for every key-value head by itself or for
all of them together (Sparse-dLLM, Song et al. 2025, arXiv 2508.02558; dLLM-Serve ranks by head).
It runs once a refresh: what it writes is read in place by every step that follows.

Shape legend as in key_scores.py; M slots of P pages.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, runs_triton, tl
from engine_service.kernels.key_scores import (
    Bounds,
    Cache,
    KeepingSpans,
    Strides,
    SumRanks,
    build_of,
    candidates_of,
    num_candidates,
    places_of,
    score_keys_ref,
    score_keys_triton,
)
from engine_service.kernels.order import count_from, nth_largest, ordered

_CANDIDATES = 64
"""Keys that a program copies at a time."""
_CHUNK = 1024
"""Scores that are looked at together while the least one that is kept is searched for."""


def keep_keys_ref(
    q_AHD: torch.Tensor,
    own: Cache,
    pages: Cache,
    spans: KeepingSpans,
    bounds: Bounds,
    sum_ranks: SumRanks | None = None,
) -> None:
    """Copies the keys and values that `spans` keep out of `own` to where `spans.pages` says.

    `sum_ranks`: the heads here are some of those that are ranked together.
    A head's keys stay in order of position; slots behind the last one are cleared, because whoever
    gathers a page reads them.
    """
    page_size, num_heads = own.k.shape[1:3]
    candidates_SC = candidates_of(spans, bounds)
    scores_SKC = score_keys_ref(q_AHD, own.k, candidates_SC, spans, bounds, sum_ranks)
    scores_SKC = _pool(scores_SKC, spans, bounds)
    place_M = torch.arange(spans.pages.shape[1] * page_size, device=q_AHD.device)
    is_kept_SM = place_M < spans.num_kept[:, None]
    chosen_SKM = _choose(scores_SKC, is_kept_SM)
    slots = candidates_SC[:, None].expand(-1, num_heads, -1).gather(2, chosen_SKM)
    heads = torch.arange(num_heads, device=slots.device)[:, None]
    source = (slots // page_size, slots % page_size, heads)
    target_pages = spans.pages.long()[:, None, place_M // page_size].expand_as(slots)
    target = (target_pages, (place_M % page_size).expand_as(slots), heads.expand_as(slots))
    for wanted, kept in zip(pages, own, strict=True):
        wanted.index_put_(target, kept[source].where(is_kept_SM[:, None, :, None], 0))


def _pool(scores_SKC: torch.Tensor, spans: KeepingSpans, bounds: Bounds) -> torch.Tensor:
    """The largest score within `reach` candidates; -inf behind the last candidate."""
    place = torch.arange(scores_SKC.shape[2], device=scores_SKC.device)
    is_candidate = place < num_candidates(spans)[:, None]
    scores = scores_SKC.where(is_candidate[:, None], -torch.inf)
    pooled = scores
    for distance in range(1, min(bounds.reach + 1, len(place))):
        is_near = (spans.reach >= distance)[:, None, None]
        for ahead in (distance, -distance):
            near = scores.roll(ahead, dims=2)
            wraps = (place < ahead) if ahead > 0 else (place >= len(place) + ahead)
            pooled = torch.maximum(pooled, near.where(is_near & ~wraps, -torch.inf))
    return pooled.where(is_candidate[:, None], -torch.inf)


def _choose(scores_SKC: torch.Tensor, is_kept_SM: torch.Tensor) -> torch.Tensor:
    """[S, K, M] chosen candidates in order, anything behind the last. Of equal scores the first
    candidate wins."""
    num_candidates, num_slots = scores_SKC.shape[2], is_kept_SM.shape[1]
    ranked = scores_SKC.sort(dim=2, descending=True, stable=True).indices
    missing = num_slots - num_candidates
    if missing > 0:
        ranked = torch.nn.functional.pad(ranked, (0, missing))
    chosen = ranked[:, :, :num_slots].where(is_kept_SM[:, None], num_candidates)
    return chosen.sort(dim=2).values.clamp(max=num_candidates - 1)


def keep_keys(
    q_AHD: torch.Tensor,
    own: Cache,
    pages: Cache,
    spans: KeepingSpans,
    bounds: Bounds,
    sum_ranks: SumRanks | None = None,
) -> None:
    """`keep_keys_ref`; two launches on CUDA, and those of a sum over ranks."""
    keep = keep_keys_triton if runs_triton(q_AHD) else keep_keys_ref
    keep(q_AHD, own, pages, spans, bounds, sum_ranks)


class _Line(NamedTuple):
    """On the device: the candidates of one span and head."""

    keys: tl.tensor
    """Their pooled scores, in order of position (kernels/order.py)."""
    count: tl.tensor
    head: tl.tensor
    first_slot: tl.tensor
    hole_start: tl.tensor
    hole: tl.tensor
    table: tl.tensor
    """The row's pages."""


@jit
def _store_pooled(
    line: _Line,
    score_ptr: tl.tensor,
    num_lines: tl.tensor,
    line_stride: tl.tensor,
    reach: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """The largest of the scores within `reach`; a score is a sum over `num_lines` lines."""
    for start in range(0, line.count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        best = tl.full([CHUNK], float("-inf"), tl.float32)
        for ahead in range(-reach, reach + 1):
            near = place + ahead
            inside = (near >= 0) & (near < line.count)
            score = tl.zeros([CHUNK], tl.float32)
            for index in range(num_lines):
                score += tl.load(score_ptr + index * line_stride + near, mask=inside, other=0.0)
            best = tl.maximum(best, tl.where(inside, score, float("-inf")))
        # Zero has two signs and one rank.
        key = ordered(tl.where(best == 0.0, 0.0, best)).to(tl.int32)
        tl.store(line.keys + place, key, mask=place < line.count)


@jit
def _copy_kept(
    line: _Line,
    own: Cache,
    pages: Cache,
    least: tl.tensor,
    num_equal: tl.tensor,
    strides: Strides,
    B: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    """Moves every candidate above `least`, and the first `num_equal` of those that equal it."""
    dims = (tl.arange(0, B.block_d) < B.head_dim)[None, :]
    written, equals = line.count * 0, line.count * 0
    for start in range(0, line.count, CANDIDATES):
        place = start + tl.arange(0, CANDIDATES)
        inside = place < line.count
        key = tl.load(line.keys + place, mask=inside, other=0).to(tl.int64)
        is_equal = inside & (key == least)
        is_early = equals + tl.cumsum(is_equal.to(tl.int32), 0) <= num_equal
        is_kept = (inside & (key > least)) | (is_equal & is_early)
        rank = written + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        slot = line.first_slot + place + tl.where(place < line.hole_start, 0, line.hole)
        source = places_of(slot, slot // B.page_size, line.head, strides, B)
        page = tl.load(line.table + rank // B.page_size, mask=is_kept, other=0)
        target = places_of(rank, page, line.head, strides, B)
        mask = is_kept[:, None] & dims
        tl.store(pages.k + target, tl.load(own.k + source, mask=mask, other=0.0), mask=mask)
        tl.store(pages.v + target, tl.load(own.v + source, mask=mask, other=0.0), mask=mask)
        written += tl.sum(is_kept.to(tl.int32), 0)
        equals += tl.sum(is_equal.to(tl.int32), 0)


@jit
def _clear(
    line: _Line,
    pages: Cache,
    first: tl.tensor,
    stop: tl.tensor,
    strides: Strides,
    B: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Zero in the row's slots [first, stop)."""
    D: tl.constexpr = B.block_d
    dims = (tl.arange(0, D) < B.head_dim)[None, :]
    for start in range(first, stop, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        page = tl.load(line.table + slot // B.page_size, mask=slot < stop, other=0)
        target = places_of(slot, page, line.head, strides, B)
        mask = (slot < stop)[:, None] & dims
        nothing = tl.zeros([SLOTS, D], tl.float32)
        tl.store(pages.k + target, nothing, mask=mask)
        tl.store(pages.v + target, nothing, mask=mask)


@partial(jit, do_not_specialize=["num_tokens", "num_pages"])
def _keep_kernel(
    own: Cache,
    pages: Cache,
    score_ptr: tl.tensor,
    key_ptr: tl.tensor,
    spans: KeepingSpans,
    strides: Strides,
    num_tokens: tl.tensor,
    num_pages: tl.tensor,
    B: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    SUMMED: tl.constexpr,
) -> None:
    """A program chooses and copies the keys of one span and head. SUMMED: behind the lines of the
    heads there is one with the sum of all of them."""
    if B.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kept = tl.load(spans.num_kept + span)
    if num_kept == 0:
        return
    start = tl.load(spans.hole_start + span)
    hole = tl.load(spans.hole_stop + span) - start
    count = tl.load(spans.length + span) - hole
    first = tl.load(spans.first_token + span)
    keys, table = key_ptr + head * num_tokens + first, spans.pages + span * num_pages
    line = _Line(keys, count, head, tl.load(spans.first_slot + span), start, hole, table)
    by_head = tl.load(spans.by_head + span) != 0
    common: tl.constexpr = B.num_heads if SUMMED else 0
    scores = score_ptr + first + tl.where(by_head, head, common) * num_tokens
    num_lines = tl.where(by_head, 1, 1 if SUMMED else B.num_heads)
    _store_pooled(line, scores, num_lines, num_tokens, tl.load(spans.reach + span), CHUNK)
    # Threads read the keys that others have stored.
    tl.debug_barrier()
    least = nth_largest(keys, count, num_kept, CHUNK)
    num_equal = num_kept - count_from(keys, count, least + 1, CHUNK)
    _copy_kept(line, own, pages, least, num_equal, strides, B, CANDIDATES)
    _clear(line, pages, num_kept, tl.load(spans.num_slots + span), strides, B, CANDIDATES)


def keep_keys_triton(
    q_AHD: torch.Tensor,
    own: Cache,
    pages: Cache,
    spans: KeepingSpans,
    bounds: Bounds,
    sum_ranks: SumRanks | None = None,
) -> None:
    """`keep_keys_ref` in two launches, but for slots that no span has, which stay as they are.

    Both caches have the same strides. The choice is the reference's wherever scores differ by more
    than the rounding of float32 sums, and where they are equal.
    """
    strides = own.k.stride()
    assert all(one.stride() == strides for one in (own.v, *pages)), "caches of several layouts"
    scores = score_keys_triton(q_AHD, own.k, spans, bounds)
    if sum_ranks is not None:
        scores = torch.cat((scores, sum_ranks(scores.sum(0, keepdim=True))))
    built = build_of(q_AHD, own.k)
    _keep_kernel[(built.num_heads, len(spans.length))](
        own,
        pages,
        scores,
        torch.empty_like(scores, dtype=torch.int32),
        spans,
        Strides(*strides[:3]),
        scores.stride(0),
        spans.pages.stride(0),
        built,
        CANDIDATES=_CANDIDATES,
        CHUNK=_CHUNK,
        SUMMED=sum_ranks is not None,
        launch_pdl=built.pdl,
    )
