"""A paged cache with shuffled pages and poisoned slots, and steps over arbitrary spans.

What the engine's page manager and runner do, small enough to check by eye.
"""

import random
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
from engine_service.core.step import FULL, Span
from engine_service.models.base import CausalModel

CPU = torch.device("cpu")


class PageTable:
    """Fixed rows of shuffled pages; entries behind a span's last page are out of range."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        page_size: int,
        seed: int,
        device: torch.device = CPU,
    ) -> None:
        self.page_size = page_size
        self.device = device
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
        device = self.device
        mask_block = torch.tensor([span.mask_block for span in spans], dtype=torch.int32)
        return AttentionBatch(
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
            positions=positions.to(device),
            kv_lens=torch.tensor([span.kv_len for span in spans], dtype=torch.int32).to(device),
            mask_block=mask_block.to(device),
            page_table=table.to(device),
            slot_mapping=(pages * size + positions % size).to(device),
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


def attend_steps(
    backend: AttentionBackend,
    table: PageTable,
    steps: Sequence[Sequence[Span]],
    window: int | None,
    *,
    on_host: bool = True,
    scale: float = 0.3,
) -> list[torch.Tensor]:
    """[T, H, D] of every step, stored and attended in turn over one poisoned cache; queries, keys
    and values depend only on the shape, the step and the span."""
    shape = backend.shape
    cache = poisoned(backend.empty_cache(table.num_pages, table.device))
    generator = torch.Generator().manual_seed(7)
    outputs = []
    for spans in steps:
        batch = table.batch(spans, on_host=on_host)
        tokens = len(batch.positions)
        q, k, v = (
            torch.randn(tokens, heads, shape.head_dim, generator=generator, dtype=torch.float64).to(
                table.device, shape.dtype
            )
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        step = plan_step(backend, batch, windows=[window], caches=[cache])
        plan = step.plans[window]
        backend.store(k, v, cache=cache, plan=plan, slots=step.slots)
        outputs.append(backend.attend(q, cache=cache, plan=plan, scale=scale))
    return outputs


def random_steps(
    draw: random.Random,
    num_rows: int,
    max_len: int,
    *,
    blocks: Sequence[int] = (1, 1, 2, 4, 8, FULL),
    lengths: Sequence[int] = (1, 1, 1, 3, 7),
) -> list[list[Span]]:
    """Rows that grow in random pieces, each with its own mask block, several rows a step.

    A piece is one of `lengths` blocks long (tokens, for causal and unmasked rows).
    """
    done = [0] * num_rows
    block_of = [draw.choice(blocks) for _ in range(num_rows)]
    steps = []
    for _ in range(12):
        spans = []
        for row in draw.sample(range(num_rows), draw.randint(1, num_rows)):
            unit = block_of[row] if block_of[row] < FULL else 1
            stop = done[row] + unit * draw.choice(lengths)
            if stop <= max_len:
                spans.append(causal(row, done[row], stop, block_of[row]))
                done[row] = stop
        if spans:
            steps.append(spans)
    return steps


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
            poisoned(self.backend.empty_cache(table.num_pages, table.device))
            for _ in range(traits.num_layers)
        ]

    def logits(self, tokens: Sequence[torch.Tensor], spans: Sequence[Span]) -> list[torch.Tensor]:
        """[q, V] per span; `tokens[row]` holds the whole row."""
        batch = self.table.batch(spans)
        ids = torch.cat([tokens[span.row][span.start : span.stop] for span in spans])
        windows = self.model.traits.windows
        step = plan_step(self.backend, batch, windows=windows, caches=self.caches)
        with torch.inference_mode():
            hidden = self.model.embed(ids, torch.arange(len(ids), device=ids.device))
            logits = self.model.logits(self.model(hidden, batch.positions, step))
        return list(logits.split([span.num_tokens for span in spans]))


def causal(row: int, start: int, stop: int, mask_block: int = 1) -> Span:
    """A span that sees what lies before its end."""
    return Span(row, start, stop, stop, mask_block, 0, 0)
