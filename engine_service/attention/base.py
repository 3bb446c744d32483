"""What attention needs to know of one step, and the interface every attention library fills.

Shape legend: T query tokens of all spans, S spans, P page-table width, H query heads,
K key-value heads, D head size, N pages, G page size.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine_service.core.step import Span
from engine_service.kernels.key_scores import Bounds, KeepingSpans
from engine_service.kernels.store_kv import store_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Ragged spans over a paged cache. Query position p of span s sees keys
    < min(kv_lens[s], (p // mask_block[s] + 1) * mask_block[s]), and with a sliding window w only
    keys > p - w.

    Host integers (`max_*`, `uniform_query_len`) are upper bounds known at planning, so that
    nothing is read back from the device.
    """

    cu_seqlens_q: torch.Tensor
    """[S + 1] int32: span s owns queries [cu[s], cu[s + 1])."""
    positions: torch.Tensor
    """[T] int64: position of every query among its row's keys."""
    kv_lens: torch.Tensor
    """[S] int32."""
    mask_block: torch.Tensor
    """[S] int32."""
    page_table: torch.Tensor
    """[S, P] int32; only the first ceil(kv_len / G) entries of a span are valid."""
    slot_mapping: torch.Tensor
    """[T] int64: page * G + offset where the query's own KV goes."""
    max_query_len: int
    max_kv_len: int
    uniform_query_len: int | None
    """Query length shared by all spans, or None."""
    all_causal: bool
    """True when mask_block is 1 for every span."""
    spans: Sequence[Span] | None = None
    """The same spans on the host. Libraries that group spans read these instead of the tensors;
    None makes them read the tensors back, which waits for the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One layer's share of the KV pool: k and v are [N, G, K, D] views, in the memory order that
    the backend's `empty_cache` chose.

    Slots that no query has written may hold anything, NaN included. A page's first write covers
    its first slot: positions of a span are computed in order and reuse ends at a page border.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKeys:
    """Which spans aside keep keys, how they choose them and where they go; for all layers."""

    caches: Sequence[LayerCache]
    """Of the pages, by layer."""
    spans: KeepingSpans
    bounds: Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What is the same for every layer and step of an engine."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """What attention leaves of a token: all heads."""
        return self.num_heads * self.head_dim


def zero_pages(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of one pool. On a CPU they take memory page by page, as they are first written: to fill
    a demo's 0.8 GB took 2.3 s of its start. They come from the kernel, not from the allocator,
    which may have used memory lie free that it would have to clear first."""
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(size, dtype=dtype, device=device)
    untouched = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        untouched.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(untouched, dtype=dtype).view(size)


class AttentionBackend(ABC):
    """One attention library. Stateless between steps apart from what `plan` returns."""

    name: str
    capturable: bool = False
    """`plan` and `attend` depend on the batch's tensors and on its host bounds alone, never on
    `spans`: one captured CUDA graph serves every step of its bucket."""

    few_queries: int = 0
    """Spans of up to as many queries can be computed beside what another library computes of the
    same step; 0: none."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def empty_cache(self, num_pages: int, device: torch.device) -> LayerCache:
        """One layer's pages, in the memory order this library reads fastest."""
        shape = self.shape
        size = (num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        k, v = (zero_pages(size, shape.dtype, device) for _ in "kv")
        return LayerCache(k=k, v=v)

    @abstractmethod
    def plan(self, batch: AttentionBatch, *, window: int | None) -> object:
        """Work shared by all layers of a step that have this sliding window (None: no window)."""

    @abstractmethod
    def attend(
        self, q_THD: torch.Tensor, *, cache: LayerCache, plan: object, scale: float
    ) -> torch.Tensor:
        """[T, H, D]; the step's own keys and values are in the cache already."""

    def plan_few(self, batch: AttentionBatch, *, window: int | None) -> object:
        """Work of the spans of at most `few_queries` queries alone, for `attend_few`."""
        raise NotImplementedError(f"{self.name} has no launch for few queries beside others")

    def attend_few(
        self,
        q_THD: torch.Tensor,
        *,
        cache: LayerCache,
        plan: object,
        scale: float,
        out_THD: torch.Tensor,
    ) -> None:
        """Writes the rows of these spans and leaves the others as they are."""
        raise NotImplementedError(f"{self.name} has no launch for few queries beside others")

    def store(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        cache: LayerCache,
        plan: object,
        slots: torch.Tensor,
    ) -> None:
        """Writes keys and values at `slots` [T]; CUDA layers do it in the kernel that rotates."""
        page, offset = slots // self.shape.page_size, slots % self.shape.page_size
        store_kv(cache.k, k_TKD, page, offset)
        store_kv(cache.v, v_TKD, page, offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """All that the attention layers of one step share; layer i stores into `caches[i]`.

    `aside` are tokens behind all others, over pages of their own.
    """

    backend: AttentionBackend
    plans: Mapping[int | None, object]
    caches: Sequence[LayerCache]
    slots: torch.Tensor
    """[T] int64: where the step's keys and values go."""
    aside: AsideStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AsideStep:
    """Tokens [first, ...) of a step: all layers share one cache, `kept` moves what is to stay."""

    first: int
    step: AttentionStep
    kept: KeptKeys | None


def plan_step(
    backend: AttentionBackend,
    batch: AttentionBatch | None,
    *,
    windows: Iterable[int | None],
    caches: Sequence[LayerCache],
) -> AttentionStep:
    """Plans each distinct sliding window once; `windows` is `ModelTraits.windows`.

    Without a batch there is nothing to attend for but what is aside.
    """
    if batch is None:
        nothing = torch.empty(0, dtype=torch.int64)
        return AttentionStep(backend=backend, plans={}, caches=caches, slots=nothing)
    plans = {window: backend.plan(batch, window=window) for window in set(windows)}
    return AttentionStep(backend=backend, plans=plans, caches=caches, slots=batch.slot_mapping)
