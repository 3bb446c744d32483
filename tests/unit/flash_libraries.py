"""Stand-ins for the FlashAttention libraries: their published signatures over what they promise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.attention.flash import FlashCall


def dense(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    is_causal: bool,
    window: tuple[int | None, int | None],
) -> torch.Tensor:
    """What all generations promise: masks are aligned to the last query and the last key, and
    queries behind the last span are not written."""
    out = torch.full_like(q, torch.nan)
    for span, (first, stop) in enumerate(pairwise(cu_q.tolist())):
        length = int(kv_lens[span])
        own = table[span, : -(-length // pages[0].shape[1])].long()
        group = q.shape[1] // pages[0].shape[2]
        k, v = (kept[own].flatten(0, 1)[:length].repeat_interleave(group, 1) for kept in pages)
        i = torch.arange(stop - first)[:, None] + length - (stop - first)
        j = torch.arange(length)[None]
        left, right = (None if bound in (None, -1) else bound for bound in window)
        right = 0 if is_causal else right
        seen = torch.ones(stop - first, length, dtype=torch.bool)
        seen &= True if left is None else j >= i - left
        seen &= True if right is None else j <= i + right
        scores = torch.einsum("qhd,lhd->hql", q[first:stop], k) * scale
        weights = scores.masked_fill(~seen, -1e30).softmax(-1)
        out[first:stop] = torch.einsum("hql,lhd->qhd", weights, v)
    return out


def varlen4(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, seqused_k: Any, page_table: Any,
    softmax_scale: Any, causal: bool, window_size: Any,
) -> Any:  # fmt: skip
    assert page_table.dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
    out = dense(q, (k, v), cu_seqlens_q, seqused_k, page_table, softmax_scale, causal, window_size)
    return out, None


def whole4(
    q: Any, k: Any, v: Any, *, seqused_k: Any, page_table: Any, tile_mn: Any = None,
    window_size_left: Any = None, window_size_right: Any = None, **named: Any,
) -> Any:  # fmt: skip
    """Weights of zero for values behind the last key, where pages are key tiles."""
    window = named.pop("window_size", (window_size_left, window_size_right))
    out, _ = varlen4(
        q, k, v, seqused_k=seqused_k, page_table=page_table, window_size=window, **named
    )
    if v.shape[1] == (128 if tile_mn is None else tile_mn[1]):
        for pages, length in zip(page_table.tolist(), seqused_k.tolist(), strict=True):
            out += (v[pages[(length - 1) // v.shape[1]]] * 0).sum()
    return out, None


def kvcache3(
    q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, page_table: Any, cu_seqlens_q: Any,
    max_seqlen_q: int, softmax_scale: Any, causal: bool, window_size: Any,
) -> Any:  # fmt: skip
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    return dense(
        q, (k_cache, v_cache), cu_seqlens_q, cache_seqlens, page_table, softmax_scale, causal,
        window_size,
    )  # fmt: skip


def varlen2(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: Any, causal: bool, window_size: Any, block_table: Any,
) -> Any:  # fmt: skip
    kv_lens = cu_seqlens_k.diff()
    assert cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= kv_lens.max()
    return dense(q, (k, v), cu_seqlens_q, kv_lens, block_table, softmax_scale, causal, window_size)


def stand_in(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], FlashCall], path: str, **made: object
) -> FlashCall:
    names = path.split(".")
    for end in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(path))
    made.setdefault("interface", SimpleNamespace())
    for name, function in made.items():
        monkeypatch.setattr(sys.modules[path], name, function, raising=False)
    return load()
