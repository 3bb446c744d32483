"""Paged attention of few queries per span: decoding, and blocks of diffusion.

Reading keys and values is all the time there is, so the keys of a span and key-value head are split
among programs (Dao et al. 2023, "Flash-Decoding for long-context inference"); the last one to
finish combines the parts. Many queries go to `paged_attention`.
Shape legend: S spans, K key-value heads, C splits, M rows of a tile, D head size padded to a power
of two.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine_service.kernels.arrivals import came_last
from engine_service.kernels.jit import MOST_SHARED, MUCH_SHARED, fitting_stages, jit, tl, triton
from engine_service.kernels.paged_tiles import (
    MAX_ROWS,
    Keys,
    Pages,
    Rows,
    Spans,
    Sums,
    Tiles,
    attend,
    attend_apart,
    build,
    fresh_sums,
    load_queries,
    oldest,
    operands,
    page_ids,
    see,
    store_output,
)

_MIN_SPLIT_KEYS = 256
"""Fewer keys are read faster than their part is handed over."""
_FEW_KEYS = 384
"""Up to as many small tiles win even where spans differ: a long one is soon done."""
_PROGRAMS_PER_SM = MappingProxyType({16: 3, 32: 2, 64: 2, 128: 1})
"""Programs that a multiprocessor holds at a time, by rows of a tile: so many fit its registers and
shared memory as compiled for compute capability 9.0, 16 bit and head size 128. More wait, and even
those that find no keys cost 0.2 us each."""
_MAX_SPLITS = 16
"""More parts take longer to combine than they save."""


class Parts(NamedTuple):
    """What splits hand over. One allocation serves all layers of a step."""

    acc: torch.Tensor
    """[S, K, C, M, D] float32."""
    peak: torch.Tensor
    """[S, K, C, M] float32."""
    total: torch.Tensor
    """[S, K, C, M] float32."""
    arrived: torch.Tensor
    """[S, K] int32: splits that have handed over; 0 between launches."""


def most_rows(head_dim: int, dtype: torch.dtype, shared: int = MOST_SHARED) -> int:
    """Rows of the largest tile that fits a device with `shared` bytes of shared memory for a
    program: 128 of wide heads in float32 take 169 KiB."""
    is_wide = head_dim > 128 and dtype == torch.float32
    return MAX_ROWS // 2 if is_wide and shared < MOST_SHARED else MAX_ROWS


def short_rows(max_query_len: int, group_size: int, most: int = MAX_ROWS) -> int | None:
    """Rows of a tile that holds a span's queries for a group of heads; None when none of up to
    `most` does."""
    rows = max(16, 1 << (max_query_len * group_size - 1).bit_length())
    return rows if rows <= most else None


def short_tiles(
    block_m: int,
    head_dim: int,
    dtype: torch.dtype,
    num_programs: int = 1,
    max_kv_len: int | None = None,
    shared: int = MOST_SHARED,
) -> Tiles:
    """The default cut for `short_rows`. `num_programs`, spans times key-value heads, decides
    whether tiles with fewer loads in flight, or fewer keys, let all of them run at once;
    `max_kv_len`, None where it is not known, whether one of them with many keys would then be late.
    Those of up to `most_rows` fit `shared` bytes of shared memory.
    """
    if shared < MUCH_SHARED:
        # Wide heads in float32 have no such tile at all (`most_rows`).
        if block_m == 128 and (head_dim > 128) != (dtype == torch.float32):
            return Tiles(block_m, 16, 8, 2)
        if block_m == 64 and head_dim > 128 and dtype == torch.float32:
            return Tiles(block_m, 16, 8, 1)
    if dtype == torch.float32:
        return Tiles(block_m, 16 if head_dim > 128 else 32, 4 if block_m < 64 else 8, 2)
    has_few = max_kv_len is not None and max_kv_len <= _FEW_KEYS
    if has_few and block_m == 32 and head_dim <= 128 and num_programs >= 512:
        return Tiles(block_m, 16, num_warps=2, num_stages=3)
    crowded = block_m < 64 and 384 <= num_programs < 1024
    if crowded and block_m == 16 and head_dim <= 128:
        return Tiles(block_m, 64, num_warps=2, num_stages=2)
    block_n = 32 if head_dim > 128 or crowded else 64
    return Tiles(block_m, block_n, 4 if block_m < 128 else 8, 3)


def count_splits(
    num_spans: int, num_kv_heads: int, max_kv_len: int, *, block_m: int, num_sms: int
) -> int:
    """Programs launched per span and key-value head: one wave over the device, none with fewer keys
    than it pays. A span uses as many of them as it has keys for."""
    fitting = _PROGRAMS_PER_SM[block_m] * num_sms // max(num_spans * num_kv_heads, 1)
    return max(1, min(fitting, _MAX_SPLITS, max_kv_len // _MIN_SPLIT_KEYS))


def new_parts(
    num_spans: int,
    num_kv_heads: int,
    num_splits: int,
    block_m: int,
    head_dim: int,
    device: torch.device,
) -> Parts:
    """Room for `num_splits` splits."""
    size = (num_spans, num_kv_heads, num_splits, block_m)
    block_d = max(1 << (head_dim - 1).bit_length(), 16)
    acc = torch.empty((*size, block_d), dtype=torch.float32, device=device)
    peak, total = torch.empty((2, *size), dtype=torch.float32, device=device)
    arrived = torch.zeros(size[:2], dtype=torch.int32, device=device)
    return Parts(acc, peak, total, arrived)


@jit
def _hand_over(
    parts: Parts, slot: tl.tensor, sums: Sums, valid: tl.tensor, B: tl.constexpr
) -> None:
    row = slot.to(tl.int64) * B.block_m + tl.arange(0, B.block_m)
    place = row[:, None] * B.block_d + tl.arange(0, B.block_d)[None, :]
    tl.store(parts.acc + place, sums.acc, mask=valid[:, None])
    tl.store(parts.peak + row, sums.peak, mask=valid)
    tl.store(parts.total + row, sums.total, mask=valid)


@jit
def _heads_of_queries(count: tl.tensor, B: tl.constexpr, ROWS: tl.constexpr) -> tl.tuple:
    """(query [ROWS], head [ROWS], whether the row is used [ROWS]) of a tile's first rows."""
    row = tl.arange(0, ROWS)
    query = row // B.group_size
    head = tl.program_id(1 - B.span_axis) * B.group_size + row % B.group_size
    return query, head, query < count


@jit
def _combine(
    parts: Parts,
    first_slot: tl.tensor,
    used: tl.tensor,
    valid: tl.tensor,
    B: tl.constexpr,
    ROWS: tl.constexpr,
) -> Sums:
    """The sums of `used` splits, several at a time so that their loads do not wait in turn."""
    AT_ONCE: tl.constexpr = max(4096 // (ROWS * B.block_d), 1)
    D: tl.constexpr = B.block_d
    acc = tl.zeros([ROWS, D], tl.float32)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for base in tl.range(0, used, AT_ONCE):
        split = base + tl.arange(0, AT_ONCE)
        slot = (first_slot + split).to(tl.int64)
        row = slot[:, None] * B.block_m + tl.arange(0, ROWS)[None, :]
        mask = (split < used)[:, None] & valid[None, :]
        place = row[:, :, None] * B.block_d + tl.arange(0, B.block_d)[None, None, :]
        # Past the first-level cache, which does not see what other multiprocessors write.
        part = tl.load(parts.acc + place, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        peaks = tl.load(parts.peak + row, mask=mask, other=-1e30, cache_modifier=".cg")
        totals = tl.load(parts.total + row, mask=mask, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weight = tl.exp2(peaks - new_peak[None, :])
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(totals * weight, 0)
        peak = new_peak
    return Sums(acc, peak, total)


@jit
def _store_last(
    rows: Rows,
    parts: Parts,
    sums: Sums,
    token: tl.tensor,
    count: tl.tensor,
    used: tl.tensor,
    B: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Hands over this split's sums; whoever comes last finds all parts and writes the output. Only
    the first ROWS rows of a tile hold queries."""
    query, head, valid = _heads_of_queries(count, B, B.block_m)
    num_heads = tl.num_programs(1 - B.span_axis)
    pair = tl.program_id(B.span_axis) * num_heads + tl.program_id(1 - B.span_axis)
    first_slot = pair * tl.num_programs(2)
    if used == 1:
        store_output(rows, sums, token + query, head, valid, B)
    else:
        _hand_over(parts, first_slot + tl.program_id(2), sums, valid, B)
        if came_last(parts.arrived + pair, used):
            few_queries, heads, full = _heads_of_queries(count, B, ROWS)
            whole = _combine(parts, first_slot, used, full, B, ROWS)
            store_output(rows, whole, token + few_queries, heads, full, B)


@jit
def _share(start: tl.tensor, stop: tl.tensor, B: tl.constexpr, MIN_TILES: tl.constexpr) -> tl.tuple:
    """(first key of this split, end of its keys, splits that have any) of keys [start, stop)."""
    num_tiles = tl.cdiv(stop - start, B.block_n)
    used = tl.maximum(tl.minimum(num_tiles // MIN_TILES, tl.num_programs(2)), 1)
    share = tl.maximum(tl.cdiv(num_tiles, used), 1)
    used = tl.maximum(tl.cdiv(num_tiles, share), 1)
    start += tl.program_id(2) * share * B.block_n
    return start, tl.minimum(stop, start + share * B.block_n), used


@partial(jit, do_not_specialize=["table_stride"])
def _short_kernel(
    rows: Rows,
    pages: Pages,
    spans: Spans,
    parts: Parts | None,
    table_stride: tl.tensor,
    B: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    # Before the wait only what was there when the kernel ahead began may be read. No load but that
    # of a page or of a span's first query needs the result of another.
    span, own_head = tl.program_id(B.span_axis), tl.program_id(1 - B.span_axis)
    kv_len = tl.load(spans.kv_lens + span)
    mask_block = tl.load(spans.mask_block + span)
    token, count = span, 1
    if not ONE_QUERY:
        token = tl.load(spans.cu_seqlens_q + span)
        count = tl.load(spans.cu_seqlens_q + span + 1) - token
        # Spans of more queries belong to the other kernel.
        count = tl.where(count > B.block_m // B.group_size, 0, count)
        kv_len = tl.where(count > 0, kv_len, 0)
    position = tl.load(spans.positions + token, mask=count > 0, other=0).to(tl.int32)
    query, head, valid = _heads_of_queries(count, B, B.block_m)
    sight, stop = see(position, query, count, kv_len, mask_block, B)
    start = oldest(position, B) // B.block_n * B.block_n if B.window else 0
    start, stop, used = _share(start, stop, B, MIN_TILES)
    # Split 0 always goes on to the wait: this kernel must not end before the one ahead.
    if tl.program_id(2) >= used:
        return
    keys = Keys(pages, spans.page_table + span.to(tl.int64) * table_stride, own_head)
    page = page_ids(keys, start, stop, B)
    if B.pdl:
        tl.extra.cuda.gdc_wait()
        # The product behind one row asks for weights from all multiprocessors as soon as it is let
        # go; these few programs' keys, and the parts they hand over, would come behind them.
        if tl.num_programs(B.span_axis) > 1:
            tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    q = load_queries(rows, token + query, head, valid, B)
    if B.num_parts > 1:
        sums = attend_apart(q, keys, sight, page, start, stop, rows.scale, B)
    else:
        sums = attend(q, fresh_sums(B), keys, sight, page, start, stop, rows.scale, B)
    if parts is None:
        store_output(rows, sums, token + query, head, valid, B)
    else:
        _store_last(rows, parts, sums, token, count, used, B, ROWS)


def paged_decode_triton(
    q_THD: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    *,
    scale: float,
    window: int | None,
    tiles: Tiles,
    parts: Parts | None,
    one_query: bool = False,
    out_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention_triton` for spans of at most `tiles.block_m` / (H / K) queries, each split
    at most as often as `parts` has room for; None: not at all.

    `one_query`: span s has query s and no other. `out_THD`: written instead of a new tensor; rows
    of spans with more queries stay as they are.

    With programmatic dependent launch all of `spans` is read while the launch ahead still runs: it
    must have been written before that launch, which must itself wait before it lets this one start.
    """
    out = out_THD
    if out is None:
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    rows, pages = operands(q_THD, out, k, v, scale)
    built = build(q_THD, k, window=window, tiles=tiles)
    num_splits = 1 if parts is None else parts.acc.shape[2]
    pairs = (spans.kv_lens.shape[0], k.shape[2])
    grid = (*(pairs[::-1] if tiles.span_first else pairs), num_splits)
    _short_kernel[grid](
        rows,
        pages,
        spans,
        parts,
        spans.page_table.stride(0),
        built,
        MIN_TILES=max(_MIN_SPLIT_KEYS // tiles.block_n, 1),
        ONE_QUERY=one_query,
        ROWS=triton.next_power_of_2(built.group_size) if one_query else tiles.block_m,
        num_warps=tiles.num_warps,
        num_stages=fitting_stages(tiles.num_stages, q_THD.device),
        launch_pdl=built.pdl,
        maxnreg=tiles.registers,
    )
    return out
