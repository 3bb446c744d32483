"""What all paged attention kernels share: their operands, the mask rule, the loop over key tiles.

It knows neither grids nor batches.

Shape legend: T query tokens of all spans, S spans, P page-table width, H query heads,
K key-value heads, D head size, N pages, G page size, M rows and L keys of a tile.

Rows of a tile are queries of one span times the query heads that share a key-value head, so that a
key is read once for all of them. Softmax runs over key tiles with a running maximum (Milakov and
Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135), in float32 and base 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, tl, triton

_LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
MAX_ROWS = 128
"""Rows of the largest tile. The query heads of one key-value head must fit."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut: rows and keys of a tile, warps of a program, loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    apart: bool = False
    """Each warp has a softmax of its own over an equal part of every tile's keys: for 16 rows, 16
    bits, and tiles that cross no page."""
    span_first: bool = False
    """Programs start span by span, with all heads of one; else head by head."""
    registers: int | None = None
    """A thread's at most: fewer let more programs run at once; None: as many as it takes."""


class Spans(NamedTuple):
    """The ragged batch on the device, as `AttentionBatch` describes it."""

    cu_seqlens_q: torch.Tensor
    """[S + 1] int32."""
    positions: torch.Tensor
    """[T] integers, consecutive within a span."""
    kv_lens: torch.Tensor
    """[S] int32."""
    mask_block: torch.Tensor
    """[S] int32."""
    page_table: torch.Tensor
    """[S, P] int32, rows contiguous; only the first ceil(kv_len / G) entries of a row are read."""


class Rows(NamedTuple):
    """Queries [T, H, D] of any strides, D contiguous, and the contiguous output."""

    q: torch.Tensor
    out: torch.Tensor
    token_stride: int
    head_stride: int
    scale: float
    """Of the scores, times log2(e)."""


class Pages(NamedTuple):
    """One layer's [N, G, K, D] keys and values, of equal strides, D contiguous."""

    k: torch.Tensor
    v: torch.Tensor
    page_stride: int
    slot_stride: int
    head_stride: int


class Build(NamedTuple):
    """What a kernel is compiled for."""

    num_heads: int
    group_size: int
    head_dim: int
    block_d: int
    page_size: int
    window: int
    """0: none."""
    block_m: int
    block_n: int
    num_parts: int
    """Warps that see keys of their own; 1: all share every tile."""
    span_axis: int
    """Of the grid."""
    pdl: bool
    """Programmatic dependent launch: the kernel waits itself for the one ahead of it."""


class Keys(NamedTuple):
    """On the device: where one span's keys and values of one head are."""

    pages: Pages
    table_row: tl.tensor
    head: tl.tensor


class Sight(NamedTuple):
    """On the device: row r of a tile sees the keys in [first[r], last[r])."""

    first: tl.tensor
    last: tl.tensor


class Sums(NamedTuple):
    """On the device: the state of M softmaxes. Weights are relative to 2 ** peak."""

    acc: tl.tensor
    """[M, D] weighted sum of values."""
    peak: tl.tensor
    """[M] largest score so far."""
    total: tl.tensor
    """[M] sum of weights."""


def operands(
    q_THD: torch.Tensor, out_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[Rows, Pages]:
    """Pointers and strides of queries, output and [N, G, K, D] pages."""
    assert k.stride() == v.stride()
    assert k.stride(3) == q_THD.stride(2) == 1
    assert out_THD.is_contiguous()
    rows = Rows(q_THD, out_THD, q_THD.stride(0), q_THD.stride(1), scale * _LOG2_E)
    return rows, Pages(k, v, k.stride(0), k.stride(1), k.stride(2))


def build(q_THD: torch.Tensor, k: torch.Tensor, *, window: int | None, tiles: Tiles) -> Build:
    """`Build` for queries [T, H, D] and pages [N, G, K, D]."""
    num_heads, head_dim = q_THD.shape[1:]
    page_size, num_kv_heads = k.shape[1:3]
    group_size = num_heads // num_kv_heads
    assert group_size <= tiles.block_m
    assert head_dim <= MAX_HEAD_DIM
    assert not tiles.apart or (page_size % tiles.block_n == 0 and q_THD.dtype != torch.float32)
    return Build(
        num_heads=num_heads,
        group_size=group_size,
        head_dim=head_dim,
        block_d=max(triton.next_power_of_2(head_dim), 16),
        page_size=page_size,
        window=window or 0,
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        num_parts=tiles.num_warps if tiles.apart else 1,
        span_axis=int(tiles.span_first),
        pdl=overlaps_launches(q_THD.device),
    )


@jit
def horizon(position: tl.tensor, kv_len: tl.tensor, mask_block: tl.tensor) -> tl.tensor:
    """End of the keys that a query sees: those of its own mask block and before."""
    return tl.minimum(kv_len, (position // mask_block + 1) * mask_block)


@jit
def oldest(position: tl.tensor, B: tl.constexpr) -> tl.tensor:
    """First key that a query sees through the sliding window."""
    return tl.maximum(position - B.window + 1, 0)


@jit
def see(
    position: tl.tensor,
    query: tl.tensor,
    count: tl.tensor,
    kv_len: tl.tensor,
    mask_block: tl.tensor,
    B: tl.constexpr,
) -> tl.tensor:
    """(Sight of rows whose queries stand at position + query [M], end of the keys that the first
    `count` queries see)."""
    last = horizon(position + query, kv_len, mask_block)
    stop = horizon(position + count - 1, kv_len, mask_block)
    return Sight(oldest(position + query, B), last), stop


@jit
def load_queries(
    rows: Rows, token: tl.tensor, head: tl.tensor, valid: tl.tensor, B: tl.constexpr
) -> tl.tensor:
    """[M, D] queries `token` [M] of heads `head` [M]; rows that are not `valid` are zero."""
    dim = tl.arange(0, B.block_d)
    place = token.to(tl.int64) * rows.token_stride + head * rows.head_stride
    mask = valid[:, None] & (dim < B.head_dim)[None, :]
    return tl.load(rows.q + place[:, None] + dim[None, :], mask=mask, other=0.0)


@jit
def store_output(
    rows: Rows, sums: Sums, token: tl.tensor, head: tl.tensor, valid: tl.tensor, B: tl.constexpr
) -> None:
    """Writes the weighted means of `valid` rows; 0 for those that saw no key."""
    dim = tl.arange(0, B.block_d)
    mean = sums.acc / tl.where(sums.total > 0.0, sums.total, 1.0)[:, None]
    place = (token.to(tl.int64) * B.num_heads + head) * B.head_dim
    mask = valid[:, None] & (dim < B.head_dim)[None, :]
    out = rows.out + place[:, None] + dim[None, :]
    tl.store(out, mean, mask=mask)


@jit
def fresh_sums(B: tl.constexpr) -> Sums:
    """Before the first key. The peak is finite: a row that sees nothing of a tile would otherwise
    subtract infinity from infinity."""
    M: tl.constexpr = B.block_m
    D: tl.constexpr = B.block_d
    peak = tl.full([M], -1e30, tl.float32)
    return Sums(tl.zeros([M, D], tl.float32), peak, tl.zeros([M], tl.float32))


@jit
def page_ids(keys: Keys, start: tl.tensor, stop: tl.tensor, B: tl.constexpr) -> tl.tensor:
    """Pages of the keys [start, start + L): one id where no tile crosses a page, else [L]."""
    key = start
    if B.page_size % B.block_n != 0:
        key = start + tl.arange(0, B.block_n)
    return tl.load(keys.table_row + key // B.page_size, mask=key < stop, other=0)


@jit
def _load_tile(
    pages: tl.tensor, place: tl.tensor, written: tl.tensor, B: tl.constexpr
) -> tl.tensor:
    """[L, D] keys or values; zero where nobody has written: such a slot may hold NaN, and a weight
    of zero would not hide it."""
    dim = tl.arange(0, B.block_d)
    mask = written[:, None]
    if B.block_d != B.head_dim:
        mask = mask & (dim < B.head_dim)[None, :]
    return tl.load(pages + place[:, None] + dim[None, :], mask=mask, other=0.0)


@jit
def attend(
    q: tl.tensor,
    sums: Sums,
    keys: Keys,
    sight: Sight,
    page: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    B: tl.constexpr,
) -> Sums:
    """`sums` with the keys [start, stop) added; `start` is the first key of a tile and `page` the
    `page_ids` there."""
    acc, peak, total = sums
    column = tl.arange(0, B.block_n)
    # Tiles in [whole, whole_stop) are seen by every row and need no mask.
    whole = tl.max(sight.first) if B.window else start
    whole_stop = tl.min(sight.last) - B.block_n
    head_place = keys.head.to(tl.int64) * keys.pages.head_stride
    for tile in tl.range(start, stop, B.block_n):
        # Read a turn ahead: the loads of keys and values would wait for it.
        next_page = page_ids(keys, tile + B.block_n, stop, B)
        key = tile + column
        place = page.to(tl.int64) * keys.pages.page_stride + head_place
        if B.page_size % B.block_n == 0:
            place += tile % B.page_size * keys.pages.slot_stride
            place += column * keys.pages.slot_stride
        else:
            place += key % B.page_size * keys.pages.slot_stride
        k = _load_tile(keys.pages.k, place, key < stop, B)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if (tile > whole_stop) | (tile < whole):
            seen = key[None, :] < sight.last[:, None]
            if B.window:
                seen = seen & (key[None, :] >= sight.first[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        v = _load_tile(keys.pages.v, place, key < stop, B)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
        page = next_page
    return Sums(acc, peak, total)


@jit
def _join(acc: tl.tensor, peak: tl.tensor, total: tl.tensor) -> Sums:
    """One softmax of W: [W, M, D], [W, M], [W, M]."""
    joined = tl.max(peak, 0)
    weight = tl.exp2(peak - joined[None, :])
    return Sums(tl.sum(acc * weight[:, :, None], 0), joined, tl.sum(total * weight, 0))


@jit
def attend_apart(
    q: tl.tensor,
    keys: Keys,
    sight: Sight,
    page: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    B: tl.constexpr,
) -> Sums:
    """`attend` from fresh sums, where each of W warps has a softmax of its own over its part of a
    tile. Warps that share one wait for each other nine times a tile, these three (`sm_90`)."""
    W: tl.constexpr = B.num_parts
    N: tl.constexpr = B.block_n // B.num_parts
    M: tl.constexpr = B.block_m
    D: tl.constexpr = B.block_d
    acc = tl.zeros([W, M, D], tl.float32)
    peak = tl.full([W, M], -1e30, tl.float32)
    total = tl.zeros([W, M], tl.float32)
    q_WMD = tl.broadcast_to(q[None, :, :], [W, M, D])
    column = tl.arange(0, W)[:, None] * N + tl.arange(0, N)[None, :]
    dim = tl.arange(0, D)[None, None, :]
    whole = tl.max(sight.first) if B.window else start
    whole_stop = tl.min(sight.last) - B.block_n
    head_place = keys.head.to(tl.int64) * keys.pages.head_stride
    for tile in tl.range(start, stop, B.block_n):
        next_page = page_ids(keys, tile + B.block_n, stop, B)
        key = tile + column
        place = page.to(tl.int64) * keys.pages.page_stride + head_place
        place += tile % B.page_size * keys.pages.slot_stride
        at = (place + column * keys.pages.slot_stride)[:, :, None] + dim
        written = (key < stop)[:, :, None]
        if B.block_d != B.head_dim:
            written = written & (dim < B.head_dim)
        k = tl.load(keys.pages.k + at, mask=written, other=0.0)
        scores = tl.dot(q_WMD, tl.permute(k, (0, 2, 1)))
        if (tile > whole_stop) | (tile < whole):
            seen = key[:, None, :] < sight.last[None, :, None]
            if B.window:
                seen = seen & (key[:, None, :] >= sight.first[None, :, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 2) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, :, None])
        shrink = tl.exp2(peak - new_peak)
        v = tl.load(keys.pages.v + at, mask=written, other=0.0)
        total = total * shrink + tl.sum(weights, 2)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, :, None])
        peak = new_peak
        page = next_page
    return _join(acc, peak, total)
