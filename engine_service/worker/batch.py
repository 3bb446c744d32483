"""Puts a step's arrays on the device: what one forward and its decisions read.

It does not know how the arrays came about, nor what a strategy does with its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_service.attention.base import AttentionBatch
from engine_service.worker.layout import DecideLayout, ScoreLayout, StepLayout
from engine_service.worker.tables import RowTables


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidePart:
    """The device columns of a DecideLayout, all int64."""

    layout: DecideLayout
    queries: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    span_rows: torch.Tensor
    cu_decide: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """The device columns of a ScoreLayout."""

    layout: ScoreLayout
    queries: torch.Tensor
    token_ids: torch.Tensor
    """[N] int64 the tokens that stand there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward. `places` and `attention.positions` are [T] int64."""

    places: torch.Tensor
    attention: AttentionBatch
    decides: tuple[DecidePart, ...]
    scores: ScorePart | None


def columns_of(layout: StepLayout) -> list[np.ndarray]:
    """Every array of the step, in the order in which `bind_batch` takes their tensors."""
    own = [
        layout.places,
        layout.positions,
        layout.slots,
        layout.owners,
        layout.rows,
        layout.cu_seqlens,
        layout.kv_lens,
        layout.mask_block,
    ]
    for part in layout.decides:
        own += [part.queries, part.rows, part.positions, part.span_rows, part.cu_decide]
    if layout.scores is not None:
        own += [layout.scores.queries, layout.scores.places]
    return own


def bind_batch(
    layout: StepLayout, staged: Sequence[torch.Tensor], tables: RowTables
) -> ForwardBatch:
    """The batch whose columns are `staged`, the device copies of `columns_of(layout)`."""
    rest = iter(staged)
    places, positions, slots, owners, rows, cu_seqlens, kv_lens, mask_block = _next(rest, 8)
    num_pages = -(-layout.max_kv_len // tables.page_size)
    attention = AttentionBatch(
        cu_seqlens_q=cu_seqlens,
        span_of_token=owners,
        positions=positions,
        kv_lens=kv_lens,
        mask_block=mask_block,
        page_table=tables.page_table[:, :num_pages].index_select(0, rows),
        slot_mapping=slots,
        max_query_len=layout.max_query_len,
        max_kv_len=layout.max_kv_len,
        uniform_query_len=layout.uniform_query_len,
        all_causal=layout.all_causal,
        spans=layout.spans or None,
    )
    decides = tuple(_decide_part(part, rest) for part in layout.decides)
    scores = None
    if layout.scores is not None:
        queries, known = _next(rest, 2)
        token_ids = tables.sampling.tokens.view(-1).index_select(0, known)
        scores = ScorePart(layout=layout.scores, queries=queries, token_ids=token_ids)
    return ForwardBatch(places=places, attention=attention, decides=decides, scores=scores)


def _decide_part(layout: DecideLayout, rest: Iterator[torch.Tensor]) -> DecidePart:
    queries, rows, positions, span_rows, cu_decide = _next(rest, 5)
    return DecidePart(
        layout=layout,
        queries=queries,
        rows=rows,
        positions=positions,
        span_rows=span_rows,
        cu_decide=cu_decide,
    )


def _next(rest: Iterator[torch.Tensor], count: int) -> list[torch.Tensor]:
    return [next(rest) for _ in range(count)]
