"""Turns a plan's spans into the integer arrays of one forward.

Host half of a batch: numpy only, one array per column and no loop over spans. It does not know
the model or the device.
Shape legend: S spans, T query tokens, N decided positions, R spans of one method.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from engine_service.core.step import Span
from engine_service.sampling.batch import Wants
from engine_service.worker.tables import RowTables


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideLayout:
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
    queries: np.ndarray
    """[N] int64 index of the query whose logits decide."""
    rows: np.ndarray
    positions: np.ndarray
    span_rows: np.ndarray
    cu_decide: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLayout:
    """Known positions whose log-probabilities are wanted."""

    spans: np.ndarray
    """[R] indices into the plan's spans."""
    counts: np.ndarray
    """[R] scored positions per span."""
    logprob_counts: np.ndarray
    """[R] alternatives the span's request wants."""
    queries: np.ndarray
    """[N] int64 index of the query whose logits score."""
    places: np.ndarray
    """[N] int64 where the known tokens stand in the flat token table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One forward. Token columns are [T], span columns [S]; formats are those of AttentionBatch."""

    spans: Sequence[Span]
    places: np.ndarray
    """int64: where the token's id stands in the flat token table."""
    positions: np.ndarray
    slots: np.ndarray
    owners: np.ndarray
    """int64: the token's span."""
    rows: np.ndarray
    cu_seqlens: np.ndarray
    kv_lens: np.ndarray
    mask_block: np.ndarray
    max_query_len: int
    max_kv_len: int
    uniform_query_len: int | None
    all_causal: bool
    decides: tuple[DecideLayout, ...]
    scores: ScoreLayout | None


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
    store_from: np.ndarray


class _Queries(NamedTuple):
    """Where the spans lie in the flat batch."""

    columns: _Columns
    order: np.ndarray
    """[S] int64: the plan's index of every span of the batch."""
    cu_seqlens: np.ndarray
    """[S + 1] int64."""
    offsets: np.ndarray
    """[S] int64: position p of span s takes the logits of flat query p + offsets[s]."""


def lay_out(
    spans: Sequence[Span],
    tables: RowTables,
    *,
    logits_shift: int,
    logit_chunk: int,
    longest_first: bool = False,
) -> StepLayout:
    """The arrays of a non-empty list of spans.

    The token at position p takes the logits of query p - logits_shift, which must lie in the same
    span. Spans of one method share a part until it holds `logit_chunk` rows of logits (one span
    is never split). `longest_first` orders the batch by how much its spans see, so that a device
    which works on many at a time does not end with the longest.
    """
    columns, order = _columns(spans), np.arange(len(spans))
    if longest_first:
        order = np.argsort(-columns.kv_len, kind="stable")
        columns = _Columns(*(column[order] for column in columns))
        spans = [spans[index] for index in order.tolist()]
    lengths = columns.stop - columns.start
    longest, shortest = int(lengths.max()), int(lengths.min())
    assert shortest > 0, f"empty span in {spans}"
    cu_seqlens = _running_sum(lengths)
    offsets = cu_seqlens[:-1] - columns.start - logits_shift
    queries = _Queries(columns, order, cu_seqlens, offsets)
    max_kv_len = int(columns.kv_len.max())
    assert max_kv_len <= tables.width, f"kv_len {max_kv_len} in rows of {tables.width}"
    owners = np.arange(len(spans)).repeat(lengths)
    positions = np.arange(int(cu_seqlens[-1])) + (columns.start - cu_seqlens[:-1])[owners]
    row_of_token = columns.row[owners]
    return StepLayout(
        spans=spans,
        places=row_of_token * tables.width + positions,
        positions=positions,
        slots=_slots(positions, row_of_token, columns.store_from[owners], tables),
        owners=owners,
        rows=columns.row,
        cu_seqlens=cu_seqlens.astype(np.int32),
        kv_lens=columns.kv_len.astype(np.int32),
        mask_block=columns.mask_block.astype(np.int32),
        max_query_len=longest,
        max_kv_len=max_kv_len,
        uniform_query_len=longest if longest == shortest else None,
        all_causal=int(columns.mask_block.max()) == 1,
        decides=tuple(_decides(queries, tables, logit_chunk)),
        scores=_scores(queries, tables),
    )


def _slots(
    positions: np.ndarray, rows: np.ndarray, store_from: np.ndarray, tables: RowTables
) -> np.ndarray:
    """[T] int64 where each token's keys and values go: into the trash page if they are stored."""
    pages = tables.host_pages[rows, positions // tables.page_size]
    slots = pages * tables.page_size + positions % tables.page_size
    return np.where(positions < store_from, tables.trash_slot, slots)


def _columns(spans: Sequence[Span]) -> _Columns:
    width = len(_Columns._fields)
    # From one flat iterator: np.array on tuples looks at every object twice.
    flat = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=width * len(spans))
    return _Columns(*np.ascontiguousarray(flat.reshape(-1, width).T))


def _decides(queries: _Queries, tables: RowTables, logit_chunk: int) -> Iterator[DecideLayout]:
    columns = queries.columns
    counts = columns.decide_stop - columns.decide_start
    deciding = counts.nonzero()[0]
    if deciding.size == 0:
        return
    _check_queries(queries, columns.decide_start, columns.decide_stop, deciding)
    methods = tables.method_of_row[columns.row[deciding]]
    for method in sorted(set(methods.tolist())):
        for spans in _chunks(deciding[methods == method], counts, logit_chunk):
            yield _decide_part(queries, tables, method, spans)


def _decide_part(
    queries: _Queries, tables: RowTables, method: int, spans: np.ndarray
) -> DecideLayout:
    columns = queries.columns
    starts, span_rows = columns.decide_start[spans], columns.row[spans]
    counts = columns.decide_stop[spans] - starts
    positions = _ranges(starts, counts)
    return DecideLayout(
        method=method,
        spans=queries.order[spans],
        counts=counts,
        logprob_counts=tables.logprobs_of_row[span_rows],
        wants=tables.wants(span_rows, int(starts.min())),
        max_position=int(positions.max()),
        queries=positions + queries.offsets[spans].repeat(counts),
        rows=span_rows.repeat(counts),
        positions=positions,
        span_rows=span_rows,
        cu_decide=_running_sum(counts),
    )


def _scores(queries: _Queries, tables: RowTables) -> ScoreLayout | None:
    columns = queries.columns
    spans = (columns.score_stop - columns.score_start).nonzero()[0]
    if spans.size == 0:
        return None
    _check_queries(queries, columns.score_start, columns.score_stop, spans)
    starts, rows = columns.score_start[spans], columns.row[spans]
    counts = columns.score_stop[spans] - starts
    positions = _ranges(starts, counts)
    return ScoreLayout(
        spans=queries.order[spans],
        counts=counts,
        logprob_counts=tables.prompt_logprobs_of_row[rows],
        queries=positions + queries.offsets[spans].repeat(counts),
        places=positions + (rows * tables.width).repeat(counts),
    )


def _check_queries(
    queries: _Queries, starts: np.ndarray, stops: np.ndarray, spans: np.ndarray
) -> None:
    """Every wanted row of logits belongs to a query of its own span."""
    after_first = starts + queries.offsets >= queries.cu_seqlens[:-1]
    before_last = stops + queries.offsets <= queries.cu_seqlens[1:]
    wanted = (after_first & before_last)[spans]
    assert wanted.all(), f"logits outside of their spans: {queries.columns}"


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
