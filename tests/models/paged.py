"""A paged cache with shuffled pages and poisoned slots, and forwards over arbitrary spans.

What the engine's page manager and runner do, small enough to check by eye.
"""

from collections.abc import Sequence

import torch

from engine_service.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    LayerCache,
    plan_step,
)
from engine_service.attention.select import create_backend
from engine_service.core.step import Span
from engine_service.models.base import CausalModel


class PageTable:
    """Fixed rows of shuffled pages; entries behind a span's last page are out of range."""

    def __init__(self, num_rows: int, max_len: int, page_size: int, seed: int) -> None:
        self.page_size = page_size
        width = -(-max_len // page_size)
        order = torch.Generator().manual_seed(seed)
        self.num_pages = num_rows * width + 3
        shuffled = torch.randperm(self.num_pages, generator=order)[: num_rows * width]
        self.rows = shuffled.view(num_rows, width)

    def batch(self, spans: Sequence[Span], *, on_host: bool = True) -> AttentionBatch:
        """What a runner would hand to attention; `on_host` False leaves the tensors only."""
        size = self.page_size
        lengths = [span.num_tokens for span in spans]
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        span_of_token = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(lengths))
        rows = torch.tensor([span.row for span in spans])
        table = self.rows[rows].int()
        for line, span in zip(table, spans, strict=True):
            line[-(-span.kv_len // size) :] = 1 << 30
        pages = self.rows[rows[span_of_token], positions // size]
        return AttentionBatch(
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int(),
            span_of_token=span_of_token,
            positions=positions,
            kv_lens=torch.tensor([span.kv_len for span in spans], dtype=torch.int32),
            mask_block=torch.tensor([span.mask_block for span in spans], dtype=torch.int32),
            page_table=table,
            slot_mapping=pages * size + positions % size,
            max_query_len=max(lengths),
            max_kv_len=max(span.kv_len for span in spans),
            uniform_query_len=lengths[0] if len(set(lengths)) == 1 else None,
            all_causal=all(span.mask_block == 1 for span in spans),
            spans=tuple(spans) if on_host else None,
        )


def poisoned(cache: LayerCache) -> LayerCache:
    """Every slot NaN, so that reading one that nobody wrote shows in the result."""
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


class PagedRunner:
    """A model with its caches; `logits` runs one step."""

    def __init__(self, model: CausalModel, backend: str, table: PageTable) -> None:
        traits = model.traits
        dtype = next(model.parameters()).dtype
        shape = AttentionShape(
            num_heads=traits.num_heads,
            num_kv_heads=traits.num_kv_heads,
            head_dim=traits.head_dim,
            page_size=table.page_size,
            dtype=dtype,
        )
        self.model = model
        self.table = table
        self.backend: AttentionBackend = create_backend(backend, shape)
        self.caches = [
            poisoned(self.backend.empty_cache(table.num_pages, torch.device("cpu")))
            for _ in range(traits.num_layers)
        ]

    def logits(self, tokens: Sequence[torch.Tensor], spans: Sequence[Span]) -> list[torch.Tensor]:
        """[q, V] per span; `tokens[row]` holds the whole row."""
        batch = self.table.batch(spans)
        ids = torch.cat([tokens[span.row][span.start : span.stop] for span in spans])
        windows = self.model.traits.windows
        step = plan_step(self.backend, batch, windows=windows, caches=self.caches)
        with torch.inference_mode():
            logits = self.model.logits(self.model(ids, batch.positions, step))
        return list(logits.split([span.num_tokens for span in spans]))


def causal(row: int, start: int, stop: int, mask_block: int = 1) -> Span:
    """A span that sees what lies before its end."""
    return Span(row, start, stop, stop, mask_block, 0, 0)
