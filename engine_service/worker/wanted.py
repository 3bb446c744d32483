"""Which queries of a step give logits, for decisions and for scores.

Host half: numpy only, no loop over spans. It does not know where keys and values go.
Shape legend: S spans, N decided or scored positions, R spans of one method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine_service.core.step import Span, new_span
from engine_service.sampling.batch import Wants
from engine_service.worker.tables import RowTables

_ALL = 1 << 40
"""More positions than any step decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideLayout:
    """Decided positions of some spans of one method, few enough for their logits to exist at once;
    any number where a piece of them exists at a time."""

    method: int
    spans: np.ndarray
    """[R] indices into the plan's spans."""
    counts: np.ndarray
    """[R] decided positions per span."""
    num_open: int
    """Most of them all that are not final yet."""
    logprob_counts: np.ndarray
    """[R] alternatives the span's request wants; -1: no log-probabilities."""
    wants: Wants
    max_position: int
    queries: np.ndarray
    """[N] int64 index of the query whose logits decide."""
    guided: np.ndarray | None
    """[M] int64 decided positions with a second query; None: there are none."""
    unguided_queries: np.ndarray | None
    """[M] int64: their queries in the copy without the prompt."""
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


class Columns(NamedTuple):
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
    kept: np.ndarray
    aside: np.ndarray
    num_fixed: np.ndarray


def cut(columns: Columns, which: slice | np.ndarray) -> Columns:
    """Some of the spans, or all in another order."""
    return Columns(*(column[which] for column in columns))


def spans_of(columns: Columns) -> list[Span]:
    """The spans one by one."""
    return list(map(new_span, zip(*(column.tolist() for column in columns), strict=True)))


class Queries(NamedTuple):
    """Where the spans lie in the flat batch."""

    columns: Columns
    order: np.ndarray
    """[S] int64: the plan's index of every span of the batch."""
    cu_seqlens: np.ndarray
    """[S + 1] int64."""
    offsets: np.ndarray
    """[S] int64: position p of span s takes the logits of flat query p + offsets[s]."""
    num_copies: int
    """The last spans of the batch are second copies of as many ahead of them."""


def lay_out_decided(
    queries: Queries, tables: RowTables, logit_chunk: int
) -> Iterator[DecideLayout]:
    """Spans of one method share a part until it holds `logit_chunk` positions; where nobody asks
    for whole logits they all do, so that a step has one decision."""
    columns = queries.columns
    counts = columns.decide_stop - columns.decide_start
    deciding = counts.nonzero()[0]
    if deciding.size == 0:
        return
    _check_queries(queries, columns.decide_start, columns.decide_stop, deciding)
    methods = tables.method_of_row[columns.row[deciding]]
    num_rows = counts * np.maximum(columns.aside, 1)
    for method in sorted(set(methods.tolist())):
        mine = deciding[methods == method]
        limit = logit_chunk if _needs_whole_logits(queries, tables, mine) else _ALL
        for spans in _chunks(mine, num_rows, limit):
            yield _decide_part(queries, tables, method, spans)


def _needs_whole_logits(queries: Queries, tables: RowTables, spans: np.ndarray) -> bool:
    columns = queries.columns
    if not tables.in_pieces or queries.num_copies:
        return True
    return not tables.wants(columns.row[spans], int(columns.decide_start[spans].min())).is_plain


def _decide_part(
    queries: Queries, tables: RowTables, method: int, spans: np.ndarray
) -> DecideLayout:
    columns = queries.columns
    starts, span_rows = columns.decide_start[spans], columns.row[spans]
    counts = columns.decide_stop[spans] - starts
    positions = ranges(starts, counts)
    guided, unguided_queries = None, None
    if queries.num_copies:
        guided = (columns.aside[spans] > 1).repeat(counts).nonzero()[0]
        copies = np.minimum(spans + queries.num_copies, len(queries.offsets) - 1)
        unguided_queries = (positions + queries.offsets[copies].repeat(counts))[guided]
    return DecideLayout(
        method=method,
        guided=guided,
        unguided_queries=unguided_queries,
        spans=queries.order[spans],
        counts=counts,
        num_open=int(counts.sum() - columns.num_fixed[spans].sum()),
        logprob_counts=tables.logprobs_of_row[span_rows],
        wants=tables.wants(span_rows, int(starts.min())),
        max_position=int(positions.max()),
        queries=positions + queries.offsets[spans].repeat(counts),
        rows=span_rows.repeat(counts),
        positions=positions,
        span_rows=span_rows,
        cu_decide=running_sum(counts),
    )


def lay_out_scored(queries: Queries, tables: RowTables) -> ScoreLayout | None:
    """All known positions whose log-probabilities are wanted; None where there are none."""
    columns = queries.columns
    spans = (columns.score_stop - columns.score_start).nonzero()[0]
    if spans.size == 0:
        return None
    _check_queries(queries, columns.score_start, columns.score_stop, spans)
    starts, rows = columns.score_start[spans], columns.row[spans]
    counts = columns.score_stop[spans] - starts
    positions = ranges(starts, counts)
    return ScoreLayout(
        spans=queries.order[spans],
        counts=counts,
        logprob_counts=tables.prompt_logprobs_of_row[rows],
        queries=positions + queries.offsets[spans].repeat(counts),
        places=positions + (rows * tables.width).repeat(counts),
    )


def _check_queries(
    queries: Queries, starts: np.ndarray, stops: np.ndarray, spans: np.ndarray
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


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """All of starts[i], starts[i] + 1, ..., starts[i] + counts[i] - 1, one after the other."""
    ends = counts.cumsum()
    return np.arange(counts.sum()) + (starts + counts - ends).repeat(counts)


def running_sum(counts: np.ndarray) -> np.ndarray:
    """[n + 1] int64, from 0."""
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    counts.cumsum(out=sums[1:])
    return sums
