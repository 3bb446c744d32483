"""Puts a step's arrays on the device: what one forward and its decisions read.

It does not know how the arrays came about, nor what a strategy does with its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from engine_service.attention.base import AttentionBatch, KeptKeys, LayerCache
from engine_service.kernels.key_scores import KeepingSpans
from engine_service.kernels.page_lines import page_lines
from engine_service.worker.aside import AsideLayout, KeptLayout
from engine_service.worker.layout import StepLayout
from engine_service.worker.pooling import PoolLayout, PoolPart
from engine_service.worker.tables import RowTables
from engine_service.worker.wanted import DecideLayout, ScoreLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidePart:
    """The device columns of a DecideLayout, all int64."""

    layout: DecideLayout
    queries: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    span_rows: torch.Tensor
    cu_decide: torch.Tensor
    guided: torch.Tensor | None = None
    unguided_queries: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """The device columns of a ScoreLayout."""

    layout: ScoreLayout
    queries: torch.Tensor
    token_ids: torch.Tensor
    """[N] int64 the tokens that stand there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsidePart:
    """Tokens [first, ...) of the step, over pages of their own. `kept` are the tensors of
    KeepingSpans."""

    first: int
    attention: AttentionBatch
    layout: KeptLayout | None
    kept: Sequence[torch.Tensor]

    def kept_keys(self, caches: Sequence[LayerCache]) -> KeptKeys | None:
        """What is kept of these tokens in `caches`; None where nothing is."""
        if self.layout is None:
            return None
        spans = KeepingSpans(*self.kept)
        return KeptKeys(caches=caches, spans=spans, bounds=self.layout.bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward. `places` and `positions` are [T] int64; `attention` is None where no span is
    over the rows' pages."""

    places: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch | None
    aside: AsidePart | None
    decides: tuple[DecidePart, ...]
    scores: ScorePart | None
    pools: PoolPart | None

    @property
    def only_decides(self) -> bool:
        """Whether nobody but the step's decisions reads hidden states."""
        return self.scores is None and self.pools is None

    @property
    def reads(self) -> torch.Tensor | None:
        """[N] int64 tokens whose hidden states the step's decisions and scores read; None: all, or
        so many that picking them costs more than it saves. Nothing waits for the device."""
        if self.pools is not None:
            return None
        columns = [part.queries for part in self.decides]
        columns += [
            part.unguided_queries for part in self.decides if part.unguided_queries is not None
        ]
        if self.scores is not None:
            columns.append(self.scores.queries)
        if 2 * sum(map(len, columns)) > len(self.places):
            return None
        if len(columns) > 1:
            return torch.cat(columns)
        return columns[0] if columns else self.places[:0]


def columns_of(layout: StepLayout) -> list[np.ndarray]:
    """Every array of the step, in the order in which `bind_batch` takes their tensors."""
    own = [
        layout.places,
        layout.positions,
        layout.slots,
        layout.rows,
        layout.cu_seqlens,
        layout.kv_lens,
        layout.mask_block,
        *(layout.late or ()),
    ]
    for part in layout.decides:
        own += [part.queries, part.rows, part.positions, part.span_rows, part.cu_decide]
        if part.guided is not None and part.unguided_queries is not None:
            own += [part.guided, part.unguided_queries]
    if layout.scores is not None:
        own += [layout.scores.queries, layout.scores.places]
    if layout.pools is not None:
        own += layout.pools.columns
    if layout.slot_positions is not None:
        own.append(layout.slot_positions)
    return own if layout.aside is None else own + _columns_aside(layout.aside)


def bind_batch(
    layout: StepLayout, staged: Sequence[torch.Tensor], tables: RowTables
) -> ForwardBatch:
    """The batch whose columns are `staged`, the device copies of `columns_of(layout)`."""
    rest = iter(staged)
    places, positions, slots, rows, cu_seqlens, kv_lens, mask_block = _next(rest, 7)
    late = None if layout.late is None else _next(rest, 2)
    decides = tuple(_decide_part(part, rest) for part in layout.decides)
    scores = None
    if layout.scores is not None:
        queries, known = _next(rest, 2)
        token_ids = tables.sampling.tokens.view(-1).index_select(0, known)
        scores = ScorePart(layout=layout.scores, queries=queries, token_ids=token_ids)
    pools = None if layout.pools is None else _pool_part(layout.pools, rest)
    slot_positions = positions if layout.slot_positions is None else next(rest)
    attention = None
    if len(layout.rows):
        attention = AttentionBatch(
            cu_seqlens_q=cu_seqlens,
            positions=slot_positions[: len(layout.slots)],
            kv_lens=kv_lens,
            mask_block=mask_block,
            page_table=_page_lines(tables, rows, late, layout.max_kv_len),
            slot_mapping=slots,
            max_query_len=layout.max_query_len,
            max_kv_len=layout.max_kv_len,
            uniform_query_len=layout.uniform_query_len,
            all_causal=layout.all_causal,
            spans=layout.spans,
        )
    aside = None if layout.aside is None else _aside_part(layout.aside, positions, rest)
    return ForwardBatch(
        places=places,
        positions=positions,
        attention=attention,
        aside=aside,
        decides=decides,
        scores=scores,
        pools=pools,
    )


def _page_lines(
    tables: RowTables, rows: torch.Tensor, late: Sequence[torch.Tensor] | None, max_kv_len: int
) -> torch.Tensor:
    """[S, P] int32 pages of these rows, for as many keys."""
    num_pages = -(-max_kv_len // tables.page_size)
    if late is None:
        return tables.pages.on_device[:, :num_pages].index_select(0, rows)
    entries, pages = late
    return page_lines(tables.pages.on_device, rows, entries, pages, num_pages)


def _columns_aside(aside: AsideLayout) -> list[np.ndarray]:
    own = [aside.slots, aside.cu_seqlens, aside.lengths, aside.mask_block, aside.page_table]
    if aside.kept is not None:
        own += aside.kept.arrays
    return own


def _aside_part(
    aside: AsideLayout, positions: torch.Tensor, rest: Iterator[torch.Tensor]
) -> AsidePart:
    slots, cu_seqlens, lengths, mask_block, page_table = _next(rest, 5)
    attention = AttentionBatch(
        cu_seqlens_q=cu_seqlens,
        positions=positions[aside.first :],
        kv_lens=lengths,
        mask_block=mask_block,
        page_table=page_table,
        slot_mapping=slots,
        max_query_len=aside.longest,
        max_kv_len=aside.longest,
        uniform_query_len=aside.uniform_query_len,
        all_causal=False,
        spans=aside.spans,
    )
    return AsidePart(first=aside.first, attention=attention, layout=aside.kept, kept=tuple(rest))


def _pool_part(layout: PoolLayout, rest: Iterator[torch.Tensor]) -> PoolPart:
    names = [field.name for field in fields(PoolPart)[1:]]
    return PoolPart(layout=layout, **dict(zip(names, _next(rest, len(names)), strict=True)))


def _decide_part(layout: DecideLayout, rest: Iterator[torch.Tensor]) -> DecidePart:
    queries, rows, positions, span_rows, cu_decide = _next(rest, 5)
    guided, unguided_queries = (None, None) if layout.guided is None else _next(rest, 2)
    return DecidePart(
        guided=guided,
        unguided_queries=unguided_queries,
        layout=layout,
        queries=queries,
        rows=rows,
        positions=positions,
        span_rows=span_rows,
        cu_decide=cu_decide,
    )


def _next(rest: Iterator[torch.Tensor], count: int) -> list[torch.Tensor]:
    return [next(rest) for _ in range(count)]
