"""Attention with the Triton kernels of `engine_service.kernels`: any mask, any page size, CUDA
graphs. It chooses the kernel and its split from host bounds; it does not know how they compute.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from engine_service.attention.base import (
    AttentionBackend,
    AttentionBatch,
    LayerCache,
    zero_pages,
)
from engine_service.kernels.jit import shared_memory
from engine_service.kernels.paged_attention import paged_attention_triton
from engine_service.kernels.paged_decode import (
    Parts,
    count_splits,
    most_rows,
    new_parts,
    paged_decode_triton,
    short_rows,
    short_tiles,
)
from engine_service.kernels.paged_tiles import Spans, Tiles

_INTERPRETED_SMS = 4
"""Multiprocessors that the interpreter pretends to have: enough to split."""
_MIXED_ROWS = 16
"""Rows of the tiles that short queries beside long ones get."""
_WORTH_KEYS = 256
"""From as many keys a short query beside long ones is worth a launch of its own: one program would
still read them when the prompts are done."""


class TritonPlan(NamedTuple):
    """A step as the kernels take it: each span belongs to one of two launches."""

    spans: Spans
    window: int | None
    short: Tiles | None
    """The cut of `paged_decode`; None: `paged_attention` computes the step."""
    parts: Parts | None
    one_query: bool
    """Every span has one query."""
    long_queries: int | None
    """Spans of as many queries go to `paged_attention`; None: there are none."""


class TritonBackend(AttentionBackend):
    """bfloat16, float16 and float32; head sizes up to 256."""

    name = "triton"
    capturable = True

    def empty_cache(self, num_pages: int, device: torch.device) -> LayerCache:
        """Head-major pages: the keys of a tile are one piece of memory."""
        shape = self.shape
        size = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        k, v = (zero_pages(size, shape.dtype, device) for _ in "kv")
        return LayerCache(k=k.transpose(1, 2), v=v.transpose(1, 2))

    def plan(self, batch: AttentionBatch, *, window: int | None) -> TritonPlan:
        spans = Spans(
            cu_seqlens_q=batch.cu_seqlens_q,
            positions=batch.positions,
            kv_lens=batch.kv_lens,
            mask_block=batch.mask_block,
            page_table=batch.page_table,
        )
        group_size, shared = self.shape.group_size, shared_memory(batch.kv_lens.device)
        most = most_rows(self.shape.head_dim, self.shape.dtype, shared)
        block_m, long_queries = short_rows(batch.max_query_len, group_size, most), None
        if block_m is None:
            long_queries = 0
            if _short_beside_long(batch, _MIXED_ROWS // group_size):
                block_m, long_queries = _MIXED_ROWS, _MIXED_ROWS // group_size + 1
        short = parts = None
        if block_m is not None:
            num_programs = len(batch.kv_lens) * self.shape.num_kv_heads
            short = short_tiles(
                block_m,
                self.shape.head_dim,
                self.shape.dtype,
                num_programs,
                batch.max_kv_len,
                shared,
            )
            parts = self._parts(batch, window, block_m)
        return TritonPlan(spans, window, short, parts, batch.uniform_query_len == 1, long_queries)

    def attend(
        self, q_THD: torch.Tensor, *, cache: LayerCache, plan: object, scale: float
    ) -> torch.Tensor:
        assert isinstance(plan, TritonPlan)
        operands = (q_THD, cache.k, cache.v, plan.spans)
        out = None
        if plan.long_queries is not None:
            out = paged_attention_triton(
                *operands, scale=scale, window=plan.window, min_queries=plan.long_queries
            )
        if plan.short is not None:
            out = paged_decode_triton(
                *operands,
                scale=scale,
                window=plan.window,
                tiles=plan.short,
                parts=plan.parts,
                one_query=plan.one_query,
                out_THD=out,
            )
        assert out is not None
        return out

    def _parts(self, batch: AttentionBatch, window: int | None, block_m: int) -> Parts | None:
        num_spans, device = batch.kv_lens.shape[0], batch.kv_lens.device
        max_keys = batch.max_kv_len
        if window is not None:
            max_keys = min(max_keys, window + batch.max_query_len)
        heads, num_sms = self.shape.num_kv_heads, _num_sms(device)
        num_splits = count_splits(num_spans, heads, max_keys, block_m=block_m, num_sms=num_sms)
        if num_splits == 1:
            return None
        return new_parts(num_spans, heads, num_splits, block_m, self.shape.head_dim, device)


def _short_beside_long(batch: AttentionBatch, max_queries: int) -> bool:
    """Whether spans of at most `max_queries` queries see so many keys that they are worth a launch.
    Never where the spans are not on the host: a captured graph serves any."""
    short = (span for span in batch.spans or () if span.num_tokens <= max_queries)
    return any(span.kv_len >= _WORTH_KEYS for span in short)


@lru_cache(maxsize=8)
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
