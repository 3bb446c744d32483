"""Paged attention through every library that works here: prompts, decoding, blocks of queries.

Queries have 32 heads over 8 key-value heads of 128. Eager is scores, float32 softmax and weighted
values with repeated key-value heads, on keys that lie in one piece. It does not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine_service.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from engine_service.attention.select import open_backend
from engine_service.core.step import FULL, Span
from tidemill.bench.kernel_cases import Case
from tidemill.runtime.errors import Unsupported

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128


@dataclass(frozen=True, slots=True)
class Load:
    """`spans` equal spans: the last `queries` of `keys` positions."""

    name: str
    spans: int
    queries: int
    keys: int
    mask_block: int

    @property
    def flop(self) -> int:
        """Products of queries with the keys they see, and of weights with values."""
        block, first = self.mask_block, self.keys - self.queries
        seen = sum(min(self.keys, (p // block + 1) * block) for p in range(first, self.keys))
        return 4 * _HEADS * _HEAD_DIM * self.spans * seen

    def kv_bytes(self, itemsize: int) -> int:
        """Keys and values, each read once."""
        return 2 * self.spans * self.keys * _KV_HEADS * _HEAD_DIM * itemsize


LOADS = (
    Load("prefill causal", 8, 2048, 2048, 1),
    Load("prefill block 16", 8, 2048, 2048, 16),
    Load("prefill second half", 8, 1024, 2048, 1),
    Load("decode", 1, 1, 4096, 1),
    Load("decode", 8, 1, 16384, 1),
    Load("decode", 64, 1, 4096, 1),
    Load("decode", 256, 1, 1024, 1),
    Load("block 16", 64, 16, 1024, FULL),
    Load("block 32", 64, 32, 1024, FULL),
)


def cases(dtype: torch.dtype, device: torch.device, page_size: int) -> Iterator[Case]:
    """Every load with Triton's kernels, and with FlashAttention where it is installed.

    Long prompts are judged by operations, few queries by the bytes of keys and values.
    """
    shape = AttentionShape(
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        page_size=page_size,
        dtype=dtype,
    )
    for library in ("triton", "flash"):
        try:
            backend, _ = open_backend(library, shape, device, windows=(None,))
        except Unsupported:
            continue
        for load in LOADS:
            yield _case(library, backend, load, device)


def _case(library: str, backend: AttentionBackend, load: Load, device: torch.device) -> Case:
    dtype = backend.shape.dtype
    return Case(
        name=f"attention {library}",
        size=f"{load.name}, {load.spans} x {load.queries} of {load.keys}",
        moved=load.kv_bytes(dtype.itemsize) if load.queries <= 32 else 0,
        flop=load.flop if load.queries > 1 else 0,
        ours=lambda: paged_call(backend, load, device),
        eager=(lambda: eager_call(load, dtype, device)) if library == "triton" else None,
        capturable=backend.capturable,
    )


def paged_call(
    backend: AttentionBackend, load: Load, device: torch.device
) -> Callable[[], torch.Tensor]:
    """One layer's attention over its own random pages, planned beforehand; [T, H, D]."""
    shape = backend.shape
    batch = make_batch(load, shape.page_size, device)
    num_pages = int(batch.page_table.max()) + 1
    cache = backend.empty_cache(num_pages, device)
    for pages in (cache.k, cache.v):
        pages.normal_()
    q = torch.randn(
        load.spans * load.queries, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device
    )
    plan, scale = backend.plan(batch, window=None), shape.head_dim**-0.5
    return lambda: backend.attend(q, cache=cache, plan=plan, scale=scale)


def make_batch(load: Load, page_size: int, device: torch.device) -> AttentionBatch:
    """Pages of a span are scattered over the pool, as they are after some traffic."""
    width = -(-load.keys // page_size)
    first, spans = load.keys - load.queries, range(load.spans)
    pages = torch.randperm(load.spans * width, device=device).to(torch.int32)
    table = pages.view(load.spans, width)
    positions = torch.arange(first, load.keys, device=device).repeat(load.spans)
    owners = torch.arange(load.spans, device=device).repeat_interleave(load.queries)
    slots = table[owners, positions // page_size].long() * page_size + positions % page_size
    starts = [0, *accumulate(load.queries for _ in spans)]
    ones = torch.ones(load.spans, dtype=torch.int32, device=device)
    return AttentionBatch(
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        positions=positions,
        kv_lens=ones * load.keys,
        mask_block=ones * load.mask_block,
        page_table=table,
        slot_mapping=slots,
        max_query_len=load.queries,
        max_kv_len=load.keys,
        uniform_query_len=load.queries,
        all_causal=load.mask_block == 1,
        spans=[
            Span(row, first, load.keys, load.keys, load.mask_block, load.keys, load.keys)
            for row in spans
        ],
    )


def eager_call(load: Load, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """The same on keys and values that lie in one piece, [S, K, L, D]."""

    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(load.spans, heads, length, _HEAD_DIM, dtype=dtype, device=device)

    q, k, v = draw(_HEADS, load.queries), draw(_KV_HEADS, load.keys), draw(_KV_HEADS, load.keys)
    positions = torch.arange(load.keys - load.queries, load.keys, device=device)[:, None]
    seen = (positions // load.mask_block + 1) * load.mask_block
    hidden = torch.arange(load.keys, device=device) >= seen
    bias = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return lambda: eager_attention(q, k, v, bias, _HEAD_DIM**-0.5)


def eager_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q k^T scale + bias) v with every key-value head repeated; [S, H, Q, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(2, 3) * scale + bias
    return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v
