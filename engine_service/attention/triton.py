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
    AttentionShape,
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

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.few_queries = _MIXED_ROWS // shape.group_size

    def empty_cache(self, num_pages: int, device: torch.device) -> LayerCache:
        """Head-major pages: the keys of a tile are one piece of memory."""
        shape = self.shape
        size = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        k, v = (zero_pages(size, shape.dtype, device) for _ in "kv")
        return LayerCache(k=k.transpose(1, 2), v=v.transpose(1, 2))

    def plan(self, batch: AttentionBatch, *, window: int | None) -> TritonPlan:
        most = most_rows(self.shape.head_dim, self.shape.dtype, _shared(batch))
        block_m = short_rows(batch.max_query_len, self.shape.group_size, most)
        if block_m is not None:
            return self._plan_short(batch, window, block_m)
        if _short_beside_long(batch, self.few_queries):
            few = self._plan_short(batch, window, _MIXED_ROWS)
            return few._replace(long_queries=self.few_queries + 1)
        return TritonPlan(_spans_of(batch), window, None, None, False, long_queries=0)

    def plan_few(self, batch: AttentionBatch, *, window: int | None) -> TritonPlan:
        return self._plan_short(batch, window, _MIXED_ROWS)

    def attend(
        self, q_THD: torch.Tensor, *, cache: LayerCache, plan: object, scale: float
    ) -> torch.Tensor:
        assert isinstance(plan, TritonPlan)
        if plan.long_queries is None:
            return _attend_short(q_THD, cache, plan, scale, None)
        out = paged_attention_triton(
            q_THD,
            cache.k,
            cache.v,
            plan.spans,
            scale=scale,
            window=plan.window,
            min_queries=plan.long_queries,
        )
        return out if plan.short is None else _attend_short(q_THD, cache, plan, scale, out)

    def attend_few(
        self,
        q_THD: torch.Tensor,
        *,
        cache: LayerCache,
        plan: object,
        scale: float,
        out_THD: torch.Tensor,
    ) -> None:
        assert isinstance(plan, TritonPlan)
        _attend_short(q_THD, cache, plan, scale, out_THD)

    def _plan_short(self, batch: AttentionBatch, window: int | None, block_m: int) -> TritonPlan:
        short = short_tiles(
            block_m,
            self.shape.head_dim,
            self.shape.dtype,
            len(batch.kv_lens) * self.shape.num_kv_heads,
            batch.max_kv_len,
            _shared(batch),
        )
        parts = self._parts(batch, window, block_m)
        one_query = batch.uniform_query_len == 1
        return TritonPlan(_spans_of(batch), window, short, parts, one_query, long_queries=None)

    def _parts(self, batch: AttentionBatch, window: int | None, block_m: int) -> Parts | None:
        num_spans, device = batch.kv_lens.shape[0], batch.kv_lens.device
        max_keys = batch.max_kv_len
        if window is not None:
            # Of the spans that are computed so: others of the step may have more queries.
            queries = min(batch.max_query_len, block_m // self.shape.group_size)
            max_keys = min(max_keys, window + queries)
        heads, num_sms = self.shape.num_kv_heads, _num_sms(device)
        num_splits = count_splits(num_spans, heads, max_keys, block_m=block_m, num_sms=num_sms)
        if num_splits == 1:
            return None
        return new_parts(num_spans, heads, num_splits, block_m, self.shape.head_dim, device)


def _spans_of(batch: AttentionBatch) -> Spans:
    return Spans(
        cu_seqlens_q=batch.cu_seqlens_q,
        positions=batch.positions,
        kv_lens=batch.kv_lens,
        mask_block=batch.mask_block,
        page_table=batch.page_table,
    )


def _shared(batch: AttentionBatch) -> int:
    """Bytes of shared memory that a program may have."""
    return shared_memory(batch.kv_lens.device)


def _attend_short(
    q_THD: torch.Tensor,
    cache: LayerCache,
    plan: TritonPlan,
    scale: float,
    out_THD: torch.Tensor | None,
) -> torch.Tensor:
    assert plan.short is not None
    return paged_decode_triton(
        q_THD,
        cache.k,
        cache.v,
        plan.spans,
        scale=scale,
        window=plan.window,
        tiles=plan.short,
        parts=plan.parts,
        one_query=plan.one_query,
        out_THD=out_THD,
    )


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
