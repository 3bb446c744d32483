"""How much the queries of a hole attend to the keys around it: what a sparse cache chooses by.

Shape legend: A tokens aside, S spans, Q longest hole, C most candidates, P pages of a row, H query
heads, K key-value heads, D head size, N pages, G page size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, tl, triton

SumRanks = Callable[[torch.Tensor], torch.Tensor]
"""Adds up what every rank has of its own heads, in place."""

_CANDIDATES = 64
"""Keys that a program scores."""
_QUERIES = 16
"""Queries that it adds up at a time."""


class KeepingSpans(NamedTuple):
    """Canvases and what is kept of them; [S] int64 each but for `pages`."""

    first_token: torch.Tensor
    """The canvas's first query among the tokens aside."""
    first_slot: torch.Tensor
    """Where its first key lies; the others follow."""
    length: torch.Tensor
    """Positions of the canvas."""
    hole_start: torch.Tensor
    hole_stop: torch.Tensor
    """The positions in [start, stop) choose among all others."""
    num_kept: torch.Tensor
    """0: the span keeps nothing and has no slots."""
    num_slots: torch.Tensor
    """Slots of the row's pages, whole pages of them."""
    by_head: torch.Tensor
    """Not 0: every key-value head has its own ranking, by the best of its query heads."""
    reach: torch.Tensor
    """Neighbours on either side that scores are max-pooled over."""
    pages: torch.Tensor
    """[S, P] int32: the row's pages in order; a page that nobody reads behind the last."""


class Bounds(NamedTuple):
    """What no span exceeds, known to the host."""

    length: int
    hole: int
    reach: int


class Cache(NamedTuple):
    """[N, G, K, D] keys and values of one layer, D contiguous."""

    k: torch.Tensor
    v: torch.Tensor


def num_candidates(spans: KeepingSpans) -> torch.Tensor:
    return spans.length - (spans.hole_stop - spans.hole_start)


def candidates_of(spans: KeepingSpans, bounds: Bounds) -> torch.Tensor:
    """[S, C] slots outside of the holes in order; behind the last one the canvas's first slot."""
    start, stop = spans.hole_start[:, None], spans.hole_stop[:, None]
    place = torch.arange(bounds.length, device=start.device)
    position = torch.where(place < start, place, place + stop - start)
    is_candidate = place < num_candidates(spans)[:, None]
    return spans.first_slot[:, None] + torch.where(is_candidate, position, 0)


def score_keys_ref(
    q_AHD: torch.Tensor,
    k_NGKD: torch.Tensor,
    candidates_SC: torch.Tensor,
    spans: KeepingSpans,
    bounds: Bounds,
    sum_ranks: SumRanks | None = None,
) -> torch.Tensor:
    """[S, K, C] float32: how much the queries of a hole, added up, attend to the keys at
    `candidates` [S, C], unscaled: the order is that of their mean. Of several heads it is the best
    (`by_head`), or the sum of all, those of other ranks included."""
    ahead = torch.arange(bounds.hole, device=q_AHD.device)
    is_query = ahead < (spans.hole_stop - spans.hole_start)[:, None]
    first = (spans.first_token + spans.hole_start)[:, None]
    q_SQHD = q_AHD[torch.where(is_query, first + ahead, first)].float()
    sum_SHD = (q_SQHD * is_query[:, :, None, None]).sum(1)
    page_size, num_heads = k_NGKD.shape[1:3]
    k_SCKD = k_NGKD[candidates_SC // page_size, candidates_SC % page_size].float()
    grouped = sum_SHD.unflatten(1, (num_heads, -1))
    scores = torch.einsum("skgd,sckd->skgc", grouped, k_SCKD)
    own, common = scores.amax(2), scores.sum((1, 2))[:, None]
    if sum_ranks is not None:
        common = sum_ranks(common)
    return own.where(spans.by_head[:, None, None] != 0, common)


class Build(NamedTuple):
    """What the kernels are compiled for."""

    num_heads: int
    """Key-value heads."""
    group_size: int
    head_dim: int
    block_d: int
    page_size: int
    pdl: bool


class Strides(NamedTuple):
    """Of [N, G, K, D] pages."""

    page: int
    slot: int
    head: int


@jit
def _sum_queries(
    q_ptr: tl.tensor,
    q_stride: tl.tensor,
    count: tl.tensor,
    B: tl.constexpr,
    QUERIES: tl.constexpr,
) -> tl.tensor:
    """[D] float32: `count` queries of one head, added up."""
    D: tl.constexpr = B.block_d
    dim = tl.arange(0, D)
    total = tl.zeros([D], tl.float32)
    for start in range(0, count, QUERIES):
        query = start + tl.arange(0, QUERIES)
        mask = (query < count)[:, None] & (dim < B.head_dim)[None, :]
        q = tl.load(q_ptr + query[:, None] * q_stride + dim[None, :], mask=mask, other=0.0)
        total += tl.sum(q.to(tl.float32), 0)
    return total


@jit
def places_of(
    slot: tl.tensor, page: tl.tensor, head: tl.tensor, strides: Strides, B: tl.constexpr
) -> tl.tensor:
    """[L, D] where a head keeps `slot` of `page`, both [L]."""
    start = page.to(tl.int64) * strides.page + slot % B.page_size * strides.slot
    return (start + head * strides.head)[:, None] + tl.arange(0, B.block_d)[None, :]


@partial(jit, do_not_specialize=["num_tokens", "q_stride", "q_head_stride"])
def _score_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    score_ptr: tl.tensor,
    spans: KeepingSpans,
    strides: Strides,
    num_tokens: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    B: tl.constexpr,
    CANDIDATES: tl.constexpr,
    QUERIES: tl.constexpr,
) -> None:
    """A program scores CANDIDATES keys of one span and head."""
    if B.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, span = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(spans.hole_start + span), tl.load(spans.length + span)
    hole = tl.load(spans.hole_stop + span) - start
    place = tl.program_id(0) * CANDIDATES + tl.arange(0, CANDIDATES)
    inside = place < length - hole
    if (tl.load(spans.num_kept + span) == 0) | (tl.program_id(0) * CANDIDATES >= length - hole):
        return
    slot = tl.load(spans.first_slot + span) + place + tl.where(place < start, 0, hole)
    dim = tl.arange(0, B.block_d)
    mask = inside[:, None] & (dim < B.head_dim)[None, :]
    k_ptrs = k_ptr + places_of(slot, slot // B.page_size, head, strides, B)
    k = tl.load(k_ptrs, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(spans.first_token + span)
    best = tl.full([CANDIDATES], float("-inf"), tl.float32)
    total = tl.zeros([CANDIDATES], tl.float32)
    for member in range(B.group_size):
        q_ptrs = q_ptr + (first + start) * q_stride + (head * B.group_size + member) * q_head_stride
        score = tl.sum(k * _sum_queries(q_ptrs, q_stride, hole, B, QUERIES)[None, :], 1)
        best = tl.maximum(best, score)
        total += score
    chosen = tl.where(tl.load(spans.by_head + span) != 0, best, total)
    tl.store(score_ptr + head * num_tokens + first + place, chosen, mask=inside)


def build_of(q_AHD: torch.Tensor, k_NGKD: torch.Tensor) -> Build:
    """What kernels over these queries and pages are compiled for."""
    num_query_heads, head_dim = q_AHD.shape[1:]
    page_size, num_heads = k_NGKD.shape[1:3]
    return Build(
        num_heads=num_heads,
        group_size=num_query_heads // num_heads,
        head_dim=head_dim,
        block_d=triton.next_power_of_2(head_dim),
        page_size=page_size,
        pdl=overlaps_launches(q_AHD.device),
    )


def score_keys_triton(
    q_AHD: torch.Tensor, k_NGKD: torch.Tensor, spans: KeepingSpans, bounds: Bounds
) -> torch.Tensor:
    """[K, A] float32: what `score_keys_ref` gives to a span's candidates, from the place of its
    first token on, where the span keeps anything. Summed over the query heads of one key-value
    head at most: the sum of all heads is that of the K lines."""
    assert q_AHD.stride(2) == k_NGKD.stride(3) == 1
    built, num_tokens = build_of(q_AHD, k_NGKD), len(q_AHD)
    scores = q_AHD.new_empty((built.num_heads, num_tokens), dtype=torch.float32)
    num_tiles = triton.cdiv(bounds.length, _CANDIDATES)
    _score_kernel[(num_tiles, built.num_heads, len(spans.length))](
        q_AHD,
        k_NGKD,
        scores,
        spans,
        Strides(*k_NGKD.stride()[:3]),
        num_tokens,
        q_AHD.stride(0),
        q_AHD.stride(1),
        built,
        CANDIDATES=_CANDIDATES,
        QUERIES=_QUERIES,
        launch_pdl=built.pdl,
    )
    return scores
