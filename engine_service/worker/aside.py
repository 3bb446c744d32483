"""Lays out the spans of a step that are computed aside of the pages.

Each sees its own tokens alone, so their keys and values are needed within a layer only: all layers
write them to the same pages of one layer's size, span after span.
Shape legend: S spans aside, A their tokens; those that keep keys as in attention/kept.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine_service.core.step import FULL, Span
from engine_service.core.strategy import KeyChoice
from engine_service.worker.tables import RowTables

ChoiceOf = Callable[[Span], KeyChoice]
"""How a span's strategy chooses keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLayout:
    """The arrays of KeptKeys; `by_head` is int64."""

    queries: np.ndarray
    shares: np.ndarray
    candidates: np.ndarray
    num_candidates: np.ndarray
    targets: np.ndarray
    num_kept: np.ndarray
    by_head: np.ndarray
    reach: np.ndarray


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
    starts, stops = np.array([choice[:2] for choice in choices], dtype=np.int64).T[:, :, None]
    num_candidates = np.array([span.stop for span in own]) - (stops - starts)[:, 0]
    place = np.arange(num_candidates.max())
    # Behind the last candidate stands the span's first slot: written, and read for nothing.
    positions = np.where(place < starts, place, place + stops - starts)
    positions[place >= num_candidates[:, None]] = 0
    ahead = np.arange((stops - starts).max())
    is_query = ahead < stops - starts
    queries = np.where(is_query, starts + ahead, 0) + cu_seqlens[keeping][:, None]
    return KeptLayout(
        queries=queries,
        shares=(is_query / (stops - starts)).astype(np.float32),
        candidates=positions + bases[keeping][:, None],
        num_candidates=num_candidates,
        targets=_targets(own, tables),
        num_kept=np.array([span.kept for span in own], dtype=np.int64),
        by_head=np.array([choice.by_head for choice in choices], dtype=np.int64),
        reach=np.array([choice.pool // 2 for choice in choices], dtype=np.int64),
    )


def _targets(spans: Sequence[Span], tables: RowTables) -> np.ndarray:
    """[S, M] slots of the rows' pages; the trash slot behind the last page."""
    size = tables.page_size
    num_slots = np.array([-(-span.kv_len // size) * size for span in spans])
    place = np.arange(num_slots.max())
    pages = tables.host_pages[[span.row for span in spans]][:, place // size]
    slots = pages * size + place % size
    return np.where(place < num_slots[:, None], slots, tables.trash_slot)
