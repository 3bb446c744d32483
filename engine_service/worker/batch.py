"""Turns a plan's spans into what one forward takes: flat queries, paging, rows of logits.

Everything is computed from one integer array of the spans with numpy and goes to the device in
one copy. It does not know the model or what a strategy does with its logits.
Shape legend: S spans, T query tokens, N decided positions, R spans of one method.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from engine_service.attention.base import AttentionBatch
from engine_service.core.step import Span
from engine_service.sampling.batch import Wants
from engine_service.staging import stage
from engine_service.worker.tables import RowTables


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidePart:
    """Decided positions of some spans of one method, few enough for one piece of logits."""

    method: int
    spans: np.ndarray
    """[R] indices into the plan's spans."""
    counts: np.ndarray
    """[R] decided positions per span."""
    logprob_counts: np.ndarray
    """[R] alternatives the span's request wants; -1: no log-probabilities."""
    wants: Wants
    max_position: int
    queries: torch.Tensor
    """[N] int64 index of the query whose logits decide."""
    rows: torch.Tensor
    positions: torch.Tensor
    span_rows: torch.Tensor
    cu_decide: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """Known positions whose log-probabilities are wanted."""

    spans: np.ndarray
    """[R] indices into the plan's spans."""
    counts: np.ndarray
    """[R] scored positions per span."""
    logprob_counts: np.ndarray
    """[R] alternatives the span's request wants."""
    queries: torch.Tensor
    """[N] int64 index of the query whose logits score."""
    token_ids: torch.Tensor
    """[N] int64 the tokens that stand there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward. `input_ids` and `attention.positions` are [T] int64."""

    input_ids: torch.Tensor
    attention: AttentionBatch
    decides: tuple[DecidePart, ...]
    scores: ScorePart | None


class _Columns(NamedTuple):
    """The plan's spans, column by column, each [S] int64, in the order of Span's fields."""

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    kv_len: np.ndarray
    mask_block: np.ndarray
    decide_start: np.ndarray
    decide_stop: np.ndarray
    score_start: np.ndarray
    score_stop: np.ndarray


class _Layout(NamedTuple):
    """Where the spans lie in the flat batch."""

    columns: _Columns
    cu_seqlens: np.ndarray
    """[S + 1] int64."""
    offsets: np.ndarray
    """[S] int64: position p of span s takes the logits of flat query p + offsets[s]."""


def build_batch(
    spans: Sequence[Span], tables: RowTables, *, logits_shift: int, logit_chunk: int
) -> ForwardBatch:
    """The batch of a non-empty list of spans.

    The token at position p takes the logits of query p - logits_shift, which must lie in the same
    span. Spans of one method share a part until it holds `logit_chunk` rows of logits (one span
    is never split).
    """
    columns = _columns(spans)
    lengths = columns.stop - columns.start
    assert lengths.min() > 0, f"empty span in {spans}"
    cu_seqlens = _running_sum(lengths)
    layout = _Layout(columns, cu_seqlens, cu_seqlens[:-1] - columns.start - logits_shift)
    input_ids, attention = _attention(spans, layout, tables)
    return ForwardBatch(
        input_ids=input_ids,
        attention=attention,
        decides=tuple(_decides(layout, tables, logit_chunk)),
        scores=_scores(layout, tables),
    )


def _columns(spans: Sequence[Span]) -> _Columns:
    width = len(_Columns._fields)
    # From one flat iterator: np.array on tuples looks at every object twice.
    flat = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=width * len(spans))
    return _Columns(*np.ascontiguousarray(flat.reshape(-1, width).T))


def _attention(
    spans: Sequence[Span], layout: _Layout, tables: RowTables
) -> tuple[torch.Tensor, AttentionBatch]:
    columns, cu_seqlens, _ = layout
    lengths = columns.stop - columns.start
    num_tokens = int(cu_seqlens[-1])
    longest, shortest = int(lengths.max()), int(lengths.min())
    max_kv_len = int(columns.kv_len.max())
    size = tables.page_size
    assert max_kv_len <= tables.width, f"kv_len {max_kv_len} in rows of {tables.width}"
    span_of_token = np.arange(len(spans)).repeat(lengths)
    positions = np.arange(num_tokens) + (columns.start - cu_seqlens[:-1])[span_of_token]
    row_of_token = columns.row[span_of_token]
    pages = tables.host_pages[row_of_token, positions // size]
    staged = stage(
        [
            row_of_token * tables.width + positions,
            columns.row,
            cu_seqlens.astype(np.int32),
            span_of_token,
            positions,
            columns.kv_len.astype(np.int32),
            columns.mask_block.astype(np.int32),
            pages * size + positions % size,
        ],
        tables.device,
    )
    places, rows, cu, owners, where, kv_lens, mask_block, slots = staged
    batch = AttentionBatch(
        cu_seqlens_q=cu,
        span_of_token=owners,
        positions=where,
        kv_lens=kv_lens,
        mask_block=mask_block,
        page_table=tables.page_table[:, : -(-max_kv_len // size)].index_select(0, rows),
        slot_mapping=slots,
        max_query_len=longest,
        max_kv_len=max_kv_len,
        uniform_query_len=longest if longest == shortest else None,
        all_causal=int(columns.mask_block.max()) == 1,
        spans=spans,
    )
    return tables.sampling.tokens.view(-1).index_select(0, places), batch


def _decides(layout: _Layout, tables: RowTables, logit_chunk: int) -> Iterator[DecidePart]:
    columns = layout.columns
    counts = columns.decide_stop - columns.decide_start
    deciding = counts.nonzero()[0]
    if deciding.size == 0:
        return
    _check_queries(layout, columns.decide_start, columns.decide_stop, deciding)
    methods = tables.method_of_row[columns.row[deciding]]
    for method in sorted(set(methods.tolist())):
        for spans in _chunks(deciding[methods == method], counts, logit_chunk):
            yield _decide_part(layout, tables, method, spans)


def _decide_part(layout: _Layout, tables: RowTables, method: int, spans: np.ndarray) -> DecidePart:
    columns = layout.columns
    starts, span_rows = columns.decide_start[spans], columns.row[spans]
    counts = columns.decide_stop[spans] - starts
    positions = _ranges(starts, counts)
    staged = stage(
        [
            positions + layout.offsets[spans].repeat(counts),
            span_rows.repeat(counts),
            positions,
            span_rows,
            _running_sum(counts),
        ],
        tables.device,
    )
    queries, rows, where, of_spans, cu_decide = staged
    return DecidePart(
        method=method,
        spans=spans,
        counts=counts,
        logprob_counts=tables.logprobs_of_row[span_rows],
        wants=tables.wants(span_rows, int(starts.min())),
        max_position=int(positions.max()),
        queries=queries,
        rows=rows,
        positions=where,
        span_rows=of_spans,
        cu_decide=cu_decide,
    )


def _scores(layout: _Layout, tables: RowTables) -> ScorePart | None:
    columns = layout.columns
    spans = (columns.score_stop - columns.score_start).nonzero()[0]
    if spans.size == 0:
        return None
    _check_queries(layout, columns.score_start, columns.score_stop, spans)
    starts, rows = columns.score_start[spans], columns.row[spans]
    counts = columns.score_stop[spans] - starts
    positions = _ranges(starts, counts)
    queries, places = stage(
        [
            positions + layout.offsets[spans].repeat(counts),
            positions + (rows * tables.width).repeat(counts),
        ],
        tables.device,
    )
    return ScorePart(
        spans=spans,
        counts=counts,
        logprob_counts=tables.prompt_logprobs_of_row[rows],
        queries=queries,
        token_ids=tables.sampling.tokens.view(-1).index_select(0, places),
    )


def _check_queries(
    layout: _Layout, starts: np.ndarray, stops: np.ndarray, spans: np.ndarray
) -> None:
    """Every wanted row of logits belongs to a query of its own span."""
    after_first = starts + layout.offsets >= layout.cu_seqlens[:-1]
    before_last = stops + layout.offsets <= layout.cu_seqlens[1:]
    wanted = (after_first & before_last)[spans]
    assert wanted.all(), f"logits outside of their spans: {layout.columns}"


def _chunks(spans: np.ndarray, counts: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    """Consecutive groups of spans with at most `limit` positions, at least one span each."""
    ends = counts[spans].cumsum()
    first, taken = 0, 0
    while first < len(spans):
        stop = max(first + 1, int(np.searchsorted(ends, taken + limit, side="right")))
        yield spans[first:stop]
        first, taken = stop, int(ends[stop - 1])


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """All of starts[i], starts[i] + 1, ..., starts[i] + counts[i] - 1, one after the other."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) + (starts + counts - ends).repeat(counts)


def _running_sum(counts: np.ndarray) -> np.ndarray:
    """[n + 1] int64, from 0."""
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    counts.cumsum(out=sums[1:])
    return sums
