"""Paged attention of many queries: prompts, and steps that mix them with anything else.

A program computes one tile of queries of one span and key-value head over all keys that it sees.
Spans of few queries are faster in `paged_decode`.
Shape legend: T query tokens, S spans, H query heads, D head size, N pages, G page size,
K key-value heads.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from engine_service.kernels.jit import (
    MOST_SHARED,
    MUCH_SHARED,
    fitting_stages,
    jit,
    shared_memory,
    tl,
)
from engine_service.kernels.paged_tiles import (
    Keys,
    Pages,
    Rows,
    Spans,
    Tiles,
    attend,
    build,
    fresh_sums,
    load_queries,
    oldest,
    operands,
    page_ids,
    see,
    store_output,
)


def long_tiles(head_dim: int, dtype: torch.dtype, shared: int = MOST_SHARED) -> Tiles:
    """The default cut for a device with `shared` bytes of shared memory for a program."""
    if head_dim > 128 and shared < MUCH_SHARED:
        return Tiles(32, 16, 4, 2) if dtype == torch.float32 else Tiles(64, 32, 4, 2)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if head_dim > 128 else Tiles(64, 32, 8, 2)
    return Tiles(128, 32, 8, 2) if head_dim > 128 else Tiles(128, 64, 8, 3)


class _Place(NamedTuple):
    """On the device: queries [token, token + count) of a span."""

    span: tl.tensor
    token: tl.tensor
    count: tl.tensor


@jit
def _find_queries(
    spans: Spans,
    num_spans: tl.tensor,
    min_queries: tl.tensor,
    tile: tl.tensor,
    QUERIES: tl.constexpr,
) -> _Place:
    """The queries of a tile. Span s begins at tile cu[s] // QUERIES + s: that leaves room for its
    last tile, full or not, and needs no table. Spans of fewer than `min_queries` have none."""
    found = 0
    for base in tl.range(0, num_spans, 256):
        span = base + tl.arange(0, 256)
        cu = tl.load(spans.cu_seqlens_q + span, mask=span < num_spans, other=1 << 30)
        found += tl.sum((cu // QUERIES + span <= tile).to(tl.int32))
    span = found - 1
    first = tl.load(spans.cu_seqlens_q + span)
    end = tl.load(spans.cu_seqlens_q + span + 1)
    token = first + (tile - first // QUERIES - span) * QUERIES
    return _Place(span, token, tl.where(end - first < min_queries, 0, end - token))


@partial(jit, do_not_specialize=["num_spans", "min_queries", "table_stride"])
def _long_kernel(
    rows: Rows,
    pages: Pages,
    spans: Spans,
    num_spans: tl.tensor,
    min_queries: tl.tensor,
    table_stride: tl.tensor,
    B: tl.constexpr,
) -> None:
    if B.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    QUERIES: tl.constexpr = B.block_m // B.group_size
    # Late tiles of a span see the most keys: they go first, and short ones fill the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    span, token, left = _find_queries(spans, num_spans, min_queries, tile, QUERIES)
    if left <= 0:
        return
    count = tl.minimum(left, QUERIES)
    row = tl.arange(0, B.block_m)
    query = row // B.group_size
    head = tl.program_id(1) * B.group_size + row % B.group_size
    q = load_queries(rows, token + query, head, query < count, B)
    position = tl.load(spans.positions + token).to(tl.int32)
    kv_len = tl.load(spans.kv_lens + span)
    sight, stop = see(position, query, count, kv_len, tl.load(spans.mask_block + span), B)
    keys = Keys(pages, spans.page_table + span.to(tl.int64) * table_stride, tl.program_id(1))
    start = oldest(position, B) // B.block_n * B.block_n if B.window else 0
    page = page_ids(keys, start, stop, B)
    sums = attend(q, fresh_sums(B), keys, sight, page, start, stop, rows.scale, B)
    store_output(rows, sums, token + query, head, query < count, B)


def paged_attention_triton(
    q_THD: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    *,
    scale: float,
    window: int | None,
    tiles: Tiles | None = None,
    min_queries: int = 0,
) -> torch.Tensor:
    """[T, H, D] contiguous: softmax(q k^T * scale) v over [N, G, K, D] pages, where query position
    p of span s sees keys < min(kv_lens[s], (p // mask_block[s] + 1) * mask_block[s]) and, with a
    window, keys > p - window.

    float32, bfloat16, float16; D up to 256, H / K up to 64. Rows of queries outside every span are
    not written, nor are those of spans of fewer than `min_queries`.
    """
    tiles = tiles or long_tiles(q_THD.shape[2], q_THD.dtype, shared_memory(q_THD.device))
    of_decoding = tiles.apart or tiles.span_first or tiles.registers
    assert not of_decoding, "for few queries only"
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    rows, pages = operands(q_THD, out, k, v, scale)
    built = build(q_THD, k, window=window, tiles=tiles)
    num_spans = spans.kv_lens.shape[0]
    num_tiles = q_THD.shape[0] // (tiles.block_m // built.group_size) + num_spans
    _long_kernel[(num_tiles, k.shape[2])](
        rows,
        pages,
        spans,
        num_spans,
        min_queries,
        spans.page_table.stride(0),
        built,
        num_warps=tiles.num_warps,
        num_stages=fitting_stages(tiles.num_stages, q_THD.device),
        launch_pdl=built.pdl,
    )
    return out
