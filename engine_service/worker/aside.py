"""Lays out the spans of a step that are computed aside of the pages.

Each sees its own tokens alone, so their keys and values are needed within a layer only: all layers
write them to the same pages of one layer's size, span after span.
Shape legend: S spans aside, A their tokens; those that keep keys as in kernels/key_scores.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine_service.core.step import FULL, Span
from engine_service.core.strategy import KeyChoice
from engine_service.kernels.key_scores import Bounds
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
    spans: Sequence[Span]
    slots: np.ndarray
    """[A] int64, of the pages aside."""
    owners: np.ndarray
    cu_seqlens: np.ndarray
    lengths: np.ndarray
    """[S] int32: queries and keys of every span."""
    mask_block: np.ndarray
    page_table: np.ndarray
    kept: KeptLayout | None


def num_pages_aside(token_budget: int, max_rows: int, page_size: int) -> int:
    """Pages that hold whatever a step computes aside: every copy of a canvas begins a page."""
    return token_budget // page_size + 2 * max_rows


def lay_out_aside(
    spans: Sequence[Span], tables: RowTables, *, first: int, choice_of: ChoiceOf
) -> AsideLayout:
    """The arrays of spans that begin at position 0; `first` tokens of the step lie ahead."""
    assert all(span.start == 0 for span in spans), f"a span aside is not whole: {spans}"
    lengths = np.array([span.stop for span in spans], dtype=np.int64)
    pages = -(-lengths // tables.page_size)
    first_pages = pages.cumsum() - pages
    cu_seqlens = np.concatenate(([0], lengths.cumsum()))
    owners = np.arange(len(spans)).repeat(lengths)
    positions = np.arange(cu_seqlens[-1]) - cu_seqlens[owners]
    bases = first_pages * tables.page_size
    return AsideLayout(
        first=first,
        spans=[span._replace(kv_len=span.stop, aside=1) for span in spans],
        slots=bases[owners] + positions,
        owners=owners,
        cu_seqlens=cu_seqlens.astype(np.int32),
        lengths=lengths.astype(np.int32),
        mask_block=np.full(len(spans), FULL, dtype=np.int32),
        page_table=(first_pages[:, None] + np.arange(pages.max())).astype(np.int32),
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
    pages = tables.host_pages[[span.row for span in spans], : len(place)]
    return np.where(place < num_pages[:, None], pages, tables.trash_page).astype(np.int32)
