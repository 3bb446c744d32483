"""Lays out the spans of a step that are computed aside of the pages.

Each sees its own tokens alone, so their keys and values are needed within a layer only: all layers
write them to the same pages of one layer's size, span after span.
Shape legend: S spans aside, A their tokens; those that keep keys as in kernels/key_scores.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine_service.core.step import FULL, Span
from engine_service.core.strategy import KeyChoice
from engine_service.kernels.key_scores import Bounds, KeepingSpans
from engine_service.worker.tables import RowTables

ChoiceOf = Callable[[Span], KeyChoice]
"""How a span's strategy chooses keys."""


class KeptLayout(NamedTuple):
    """Spans aside that keep keys."""

    arrays: tuple[np.ndarray, ...]
    """Those of KeepingSpans, in their order."""
    bounds: Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class AsideLayout:
    """Spans behind all others of a step; formats are those of AttentionBatch."""

    first: int
    """Tokens of the step ahead of them."""
    spans: Sequence[Span] | None
    """None where padding stands among them."""
    slots: np.ndarray
    """[A] int64, of the pages aside."""
    cu_seqlens: np.ndarray
    lengths: np.ndarray
    """[S] int32: queries and keys of every span."""
    mask_block: np.ndarray
    page_table: np.ndarray
    longest: int
    uniform_query_len: int | None
    kept: KeptLayout | None


def num_pages_aside(token_budget: int, max_rows: int, page_size: int) -> int:
    """Pages that hold whatever a step computes aside: every copy of a canvas begins a page, and
    page 0 is where padding writes."""
    return 1 + token_budget // page_size + 2 * max_rows


def lay_out_aside(
    spans: Sequence[Span], tables: RowTables, *, first: int, choice_of: ChoiceOf
) -> AsideLayout:
    """The arrays of spans that begin at position 0; `first` tokens of the step lie ahead."""
    assert all(span.start == 0 for span in spans), f"a span aside is not whole: {spans}"
    lengths = np.array([span.stop for span in spans], dtype=np.int64)
    pages = -(-lengths // tables.page_size)
    first_pages = 1 + pages.cumsum() - pages
    cu_seqlens = np.concatenate(([0], lengths.cumsum()))
    owners = np.arange(len(spans)).repeat(lengths)
    positions = np.arange(cu_seqlens[-1]) - cu_seqlens[owners]
    bases = first_pages * tables.page_size
    longest, shortest = int(lengths.max()), int(lengths.min())
    return AsideLayout(
        first=first,
        spans=[span._replace(kv_len=span.stop, aside=1) for span in spans],
        slots=bases[owners] + positions,
        cu_seqlens=cu_seqlens.astype(np.int32),
        lengths=lengths.astype(np.int32),
        mask_block=np.full(len(spans), FULL, dtype=np.int32),
        page_table=(first_pages[:, None] + np.arange(pages.max())).astype(np.int32),
        longest=longest,
        uniform_query_len=longest if longest == shortest else None,
        kept=_lay_out_kept(spans, bases, cu_seqlens, tables, choice_of),
    )


def _lay_out_kept(
    spans: Sequence[Span],
    bases: np.ndarray,
    cu_seqlens: np.ndarray,
    tables: RowTables,
    choice_of: ChoiceOf,
) -> KeptLayout | None:
    keeping = [index for index, span in enumerate(spans) if span.kept]
    if not keeping:
        return None
    own = [spans[index] for index in keeping]
    choices = [choice_of(span) for span in own]
    starts, stops = np.array([choice[:2] for choice in choices], dtype=np.int64).T
    lengths = np.array([span.stop for span in own], dtype=np.int64)
    reach = np.array([choice.pool // 2 for choice in choices], dtype=np.int64)
    num_pages = np.array([-(-span.kv_len // tables.page_size) for span in own], dtype=np.int64)
    arrays = (
        cu_seqlens[keeping].astype(np.int64),
        bases[keeping],
        lengths,
        starts,
        stops,
        np.array([span.kept for span in own], dtype=np.int64),
        num_pages * tables.page_size,
        np.array([choice.by_head for choice in choices], dtype=np.int64),
        reach,
        _pages(own, num_pages, tables),
    )
    bounds = Bounds(int(lengths.max()), int((stops - starts).max()), int(reach.max()))
    return KeptLayout(arrays, bounds)


def _pages(spans: Sequence[Span], num_pages: np.ndarray, tables: RowTables) -> np.ndarray:
    """[S, P] int32 pages of the rows; the trash page behind the last."""
    place = np.arange(num_pages.max())
    pages = tables.pages.on_host[[span.row for span in spans], : len(place)]
    return np.where(place < num_pages[:, None], pages, tables.pages.trash_page).astype(np.int32)


def pad_aside(
    aside: AsideLayout, tables: RowTables, *, num_spans: int, num_tokens: int, longest: int
) -> AsideLayout:
    """The same spans among `num_spans` that may keep keys, of `longest` tokens at most and
    `num_tokens` in all. Padding spans have no token; tokens of nobody write to page 0."""
    more = num_spans - len(aside.lengths)
    num_pages = -(-longest // tables.page_size)
    widths = ((0, more), (0, num_pages - aside.page_table.shape[1]))
    return replace(
        aside,
        spans=None,
        slots=padded(aside.slots, num_tokens, 0),
        cu_seqlens=np.concatenate((aside.cu_seqlens, aside.cu_seqlens[-1:].repeat(more))),
        lengths=padded(aside.lengths, num_spans, 1),
        mask_block=padded(aside.mask_block, num_spans, FULL),
        page_table=np.pad(aside.page_table, widths),
        longest=longest,
        uniform_query_len=None,
        kept=_pad_kept(aside.kept, tables, num_spans, longest),
    )


def _pad_kept(
    kept: KeptLayout | None, tables: RowTables, num_spans: int, longest: int
) -> KeptLayout:
    """Padding spans, and all where none keeps keys, keep nothing."""
    shape = (num_spans, tables.pages.on_host.shape[1])
    pages = np.full(shape, tables.pages.trash_page, dtype=np.int32)
    bounds = Bounds(longest, longest, longest)
    if kept is None:
        nothing = np.zeros(num_spans, dtype=np.int64)
        return KeptLayout((nothing,) * (len(KeepingSpans._fields) - 1) + (pages,), bounds)
    *columns, own = kept.arrays
    pages[: len(own), : own.shape[1]] = own
    columns = [padded(column, num_spans, 0) for column in columns]
    return KeptLayout((*columns, pages), bounds)


def padded(column: np.ndarray, size: int, value: int) -> np.ndarray:
    """`column` with `value` behind it, `size` in all."""
    whole = np.full(size, value, dtype=column.dtype)
    whole[: len(column)] = column
    return whole
