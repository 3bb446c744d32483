"""Runs an attention library once at start-up and compares it with the reference.

A library that does not compile, launch or compute right numbers on this device is found before the
first request. It knows no library by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from engine_service.attention.base import AttentionBackend, AttentionBatch, LayerCache
from engine_service.attention.reference import ReferenceBackend
from engine_service.core.step import Span
from engine_service.kernels.jit import in_one_line
from engine_service.out_of_memory import is_out_of_memory

_PROMPTS = (Span(0, 0, 70, 70, 1, 0, 0), Span(1, 0, 3, 3, 1, 0, 0))
_NEXT_TOKENS = (Span(0, 69, 70, 70, 1, 0, 0), Span(1, 2, 3, 3, 1, 0, 0))
_LONGEST = 70
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference relative to the largest output; 1e-3 for wider formats."""


@torch.inference_mode()
def probe(
    backend: AttentionBackend, device: torch.device, *, windows: Iterable[int | None]
) -> str | None:
    """What is wrong with the library here, in one line, or None.

    Memory that runs out is no fault of the library: that error is raised.
    Two prompts and one token behind each are computed for every sliding window, with the model's
    heads, pages and number format.
    """
    shape = backend.shape
    width = -(-_LONGEST // shape.page_size)
    draw = torch.Generator().manual_seed(0)
    sizes = {"k": shape.num_kv_heads, "v": shape.num_kv_heads, "q": shape.num_heads}
    k, v, q = (
        torch.randn(2 * width, shape.page_size, heads, shape.head_dim, generator=draw).to(
            device, shape.dtype
        )
        for heads in sizes.values()
    )
    queries = q.flatten(0, 1)
    try:
        cache = backend.empty_cache(2 * width, device)
        cache.k.copy_(k)
        cache.v.copy_(v)
        for window in set(windows):
            for spans in (_PROMPTS, _NEXT_TOKENS):
                batch = _batch(spans, shape.page_size, width, device)
                fault = _fault(backend, cache, batch, queries[: len(batch.positions)], window)
                if fault is not None:
                    return fault
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return in_one_line(error)
    return None


def _fault(
    backend: AttentionBackend,
    cache: LayerCache,
    batch: AttentionBatch,
    q_THD: torch.Tensor,
    window: int | None,
) -> str | None:
    reference = ReferenceBackend(backend.shape)
    scale = backend.shape.head_dim**-0.5
    got, want = (
        library.attend(
            q_THD, cache=cache, plan=library.plan(batch, window=window), scale=scale
        ).float()
        for library in (backend, reference)
    )
    off = float((got - want).abs().max() / want.abs().max())
    if off <= _TOLERANCE.get(q_THD.dtype, 1e-3):
        return None
    return f"wrong numbers for {batch.max_query_len} queries (window {window}): off by {off:.1e}"


def _batch(
    spans: Sequence[Span], page_size: int, width: int, device: torch.device
) -> AttentionBatch:
    """Span i owns pages [i * width, (i + 1) * width)."""
    lengths = [span.num_tokens for span in spans]
    owners = torch.arange(len(spans)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    return AttentionBatch(
        cu_seqlens_q=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        positions=positions.to(device),
        kv_lens=torch.tensor([s.kv_len for s in spans], dtype=torch.int32, device=device),
        mask_block=torch.ones(len(spans), dtype=torch.int32, device=device),
        page_table=torch.arange(len(spans) * width, dtype=torch.int32, device=device).view(
            len(spans), width
        ),
        slot_mapping=(owners * width * page_size + positions).to(device),
        max_query_len=max(lengths),
        max_kv_len=max(span.kv_len for span in spans),
        uniform_query_len=lengths[0] if len(set(lengths)) == 1 else None,
        all_causal=True,
        spans=spans,
    )
