"""Turns a plan's spans into the integer arrays of one forward.

Host half of a batch: numpy only, one array per column and no loop over spans. It does not know
the model or the device.
Shape legend: S spans, T query tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from engine_service.core.step import Span, SteadyRows
from engine_service.worker.aside import AsideLayout, ChoiceOf, lay_out_aside
from engine_service.worker.page_table import LatePages
from engine_service.worker.pooling import PoolLayout, take_pooled
from engine_service.worker.tables import RowTables
from engine_service.worker.wanted import (
    Columns,
    DecideLayout,
    Queries,
    ScoreLayout,
    cut,
    lay_out_decided,
    lay_out_scored,
    running_sum,
    spans_of,
)

_FEW_QUERIES = 16
"""Queries of a span, at most, that an attention library may take for few."""
_MANY = 1 << 62
"""More tokens than any span has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One forward. Formats are those of AttentionBatch.

    `places` and `positions` are of all tokens, the others of the spans over the rows' pages and
    their tokens; those of the spans aside follow them.
    """

    columns: Columns | None
    """As attention sees them: a span behind kept keys starts behind them. None where padding stands
    among them."""
    places: np.ndarray
    """int64: where the token's id stands in the flat token table."""
    positions: np.ndarray
    slot_positions: np.ndarray | None
    """Which of the row's slots a token takes; None: that of its position."""
    slots: np.ndarray
    rows: np.ndarray
    cu_seqlens: np.ndarray
    kv_lens: np.ndarray
    mask_block: np.ndarray
    late: LatePages | None
    """Of the rows; None: the device knows all of their pages."""
    max_query_len: int
    max_kv_len: int
    uniform_query_len: int | None
    all_causal: bool
    decides: tuple[DecideLayout, ...]
    scores: ScoreLayout | None
    pools: PoolLayout | None
    aside: AsideLayout | None

    @property
    def spans(self) -> list[Span] | None:
        """`columns` as spans. O(spans)."""
        return None if self.columns is None else spans_of(self.columns)

    @property
    def only_decides(self) -> bool:
        """Whether nothing is scored or pooled."""
        return self.scores is None and self.pools is None


def lay_out(
    spans: Sequence[Span],
    tables: RowTables,
    *,
    logits_shift: int,
    logit_chunk: int,
    longest_first: bool = False,
    choice_of: ChoiceOf | None = None,
    steady: SteadyRows | None = None,
) -> StepLayout:
    """The arrays of some spans and, behind them, steady rows; of one at least.

    The token at position p takes the logits of query p - logits_shift, which must lie in the same
    span. Spans of one method share a part until it holds `logit_chunk` rows of logits (one span
    is never split). `longest_first` orders the batch by how much its spans see, so that a device
    which works on many at a time does not end with the longest; beside prompts those of fewer
    queries come later, as some attention libraries are not for them. `choice_of` is asked for spans
    that choose keys.
    """
    columns, order, num_paged = _in_order(_columns(spans, steady), longest_first)
    columns, num_copies = _with_copies(columns)
    lengths = columns.stop - columns.start
    assert lengths.min() > 0, f"empty span in {spans_of(columns)}"
    cu_seqlens = running_sum(lengths)
    offsets = cu_seqlens[:-1] - columns.start - logits_shift
    queries = Queries(columns, order, cu_seqlens, offsets, num_copies)
    pools, queries = take_pooled(queries, tables.pooled, logit_chunk)
    num_spans = len(lengths)
    owners = np.arange(num_spans).repeat(lengths)
    positions = np.arange(int(cu_seqlens[-1])) + (columns.start - cu_seqlens[:-1])[owners]
    places = columns.row[owners] * tables.width + positions
    if num_copies:
        is_hidden = positions < tables.prompt_len_of_row[columns.row[owners]]
        is_hidden &= owners >= num_spans - num_copies
        places[is_hidden] = tables.mask_place
    aside = None
    if num_paged < num_spans:
        assert choice_of is not None, "spans aside without a way to choose keys"
        first = int(cu_seqlens[num_paged])
        own = spans_of(cut(columns, slice(num_paged, None)))
        aside = lay_out_aside(own, tables, first=first, choice_of=choice_of)
    return StepLayout(
        **_paged(queries, num_paged, owners, positions, tables),
        places=places,
        positions=positions,
        decides=tuple(lay_out_decided(queries, tables, logit_chunk)),
        scores=lay_out_scored(queries, tables),
        pools=pools,
        aside=aside,
    )


def numbered(layout: StepLayout, indices: np.ndarray) -> StepLayout:
    """The layout of a plan's spans at `indices`: decisions are then those of the plan's spans."""
    assert layout.only_decides, "scores and pooled prompts name spans too"
    parts = (replace(part, spans=indices[part.spans]) for part in layout.decides)
    return replace(layout, decides=tuple(parts))


def _in_order(columns: Columns, longest_first: bool) -> tuple[Columns, np.ndarray, int]:
    """Spans over the pages first: columns, their indices in the plan, how many they are."""
    num_spans = len(columns.row)
    order = np.arange(num_spans)
    num_paged = num_spans - int(np.count_nonzero(columns.aside))
    if longest_first:
        count = columns.stop - columns.start
        if count.max() <= _FEW_QUERIES:
            count[:] = 0
        order = np.lexsort((-columns.kv_len, -np.minimum(count, _FEW_QUERIES + 1)))
    if num_paged < num_spans:
        order = order[np.argsort(columns.aside[order], kind="stable")]
    if longest_first or num_paged < num_spans:
        columns = cut(columns, order)
    return columns, order, num_paged


def _with_copies(columns: Columns) -> tuple[Columns, int]:
    """Adds the second copies, which decide nothing, behind all others; their originals are the last
    of those."""
    num_copies = int(np.count_nonzero(columns.aside > 1))
    if not num_copies:
        return columns, 0
    copies, zeros = cut(columns, slice(-num_copies, None)), np.zeros(num_copies, dtype=np.int64)
    copies = copies._replace(
        decide_start=zeros, decide_stop=zeros, aside=zeros + 1, num_fixed=zeros
    )
    return Columns(*map(np.concatenate, zip(columns, copies, strict=True))), num_copies


def _paged(
    queries: Queries,
    num_paged: int,
    owners: np.ndarray,
    positions: np.ndarray,
    tables: RowTables,
) -> dict[str, Any]:
    """The fields of StepLayout that describe the first `num_paged` spans."""
    columns = queries.columns
    cu_seqlens = queries.cu_seqlens
    slot_positions = None
    if num_paged < len(columns.row):
        columns = cut(columns, slice(num_paged))
        cu_seqlens = cu_seqlens[: num_paged + 1]
        owners, positions = owners[: cu_seqlens[-1]], positions[: cu_seqlens[-1]]
    is_behind = columns.kept > 0
    if is_behind.any():
        shifts = np.where(is_behind, columns.start - columns.kept, 0)
        positions = slot_positions = positions - shifts[owners]
        columns = columns._replace(
            start=np.where(is_behind, columns.kept, columns.start),
            stop=np.where(is_behind, columns.kv_len, columns.stop),
        )
    lengths = columns.stop - columns.start
    longest, shortest = int(lengths.max(initial=0)), int(lengths.min(initial=_MANY))
    max_kv_len = int(columns.kv_len.max(initial=0))
    assert max_kv_len <= tables.width, f"kv_len {max_kv_len} in rows of {tables.width}"
    return {
        "columns": columns,
        "slot_positions": slot_positions,
        "slots": _slots(positions, columns.row[owners], columns.store_from[owners], tables),
        "rows": columns.row,
        "cu_seqlens": cu_seqlens.astype(np.int32),
        "kv_lens": columns.kv_len.astype(np.int32),
        "mask_block": columns.mask_block.astype(np.int32),
        "late": tables.pages.late_of(columns.row),
        "max_query_len": longest,
        "max_kv_len": max_kv_len,
        "uniform_query_len": longest if longest == shortest else None,
        "all_causal": int(columns.mask_block.max(initial=0)) == 1,
    }


def _slots(
    positions: np.ndarray, rows: np.ndarray, store_from: np.ndarray, tables: RowTables
) -> np.ndarray:
    """[T] int64 where each token's keys and values go: into the trash page if they are stored."""
    pages = tables.pages.on_host[rows, positions // tables.page_size]
    slots = pages * tables.page_size + positions % tables.page_size
    return np.where(positions < store_from, tables.trash_slot, slots)


def _columns(spans: Sequence[Span], steady: SteadyRows | None) -> Columns:
    width = len(Columns._fields)
    # From one flat iterator: np.array on tuples looks at every object twice.
    flat = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=width * len(spans))
    own = flat.reshape(-1, width).T
    if steady is None:
        return Columns(*np.ascontiguousarray(own))
    both = np.zeros((width, len(spans) + len(steady.rows)), dtype=np.int64)
    both[:, : len(spans)] = own
    # Column by column what steady_span says of one row.
    tail = Columns(*both[:, len(spans) :])
    positions = np.array(steady.offsets, dtype=np.int64) + steady.shift
    tail.row[:], tail.mask_block[:] = steady.rows, 1
    tail.start[:], tail.stop[:], tail.kv_len[:] = positions - 1, positions, positions
    tail.decide_start[:], tail.decide_stop[:] = positions, positions + 1
    return Columns(*both)
