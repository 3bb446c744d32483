"""Turns a step's results on the host into one decision per span. It does not know the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine_service.core.step import Decision, Decisions, TokenLogprobs
from engine_service.sampling.batch import DecideResult
from engine_service.sampling.logprobs import Scores
from engine_service.worker.wanted import DecideLayout, ScoreLayout

_ONE_FINAL = [True]


def split_decided(layout: DecideLayout, result: DecideResult, decisions: Decisions) -> None:
    """Puts each span's share into `decisions`; rows behind the layout's own are padding.

    Spans behind those that have a decision of their own are steady rows.
    """
    is_steady = layout.spans >= len(decisions.own)
    if is_steady.any():
        _split_steady(layout, result, is_steady, decisions)
        if is_steady.all():
            return
    own, num_own = decisions.own, len(decisions.own)
    token_ids = result.token_ids.tolist()
    if (
        result.final is None
        and result.logprobs is None
        and len(layout.positions) == len(layout.spans)
    ):
        for span, token in zip(layout.spans.tolist(), token_ids, strict=False):
            if span < num_own:
                own[span] = Decision([token], _ONE_FINAL)
        return
    final = [True] * len(token_ids) if result.final is None else result.final.tolist()
    entries = _decided_entries(layout, result, final)
    sure = None if result.confidence is None else result.confidence.tolist()
    at = 0
    for span, count, k in zip(
        layout.spans.tolist(), layout.counts.tolist(), layout.logprob_counts.tolist(), strict=True
    ):
        here = slice(at, at + count)
        at += count
        if span < num_own:
            own[span] = Decision(
                token_ids[here],
                final[here],
                None if k < 0 else entries[here],
                confidence=None if sure is None else sure[here],
            )


def _split_steady(
    layout: DecideLayout, result: DecideResult, is_steady: np.ndarray, decisions: Decisions
) -> None:
    """The tokens of the steady rows, in the plan's order; each decides one position."""
    firsts = layout.counts.cumsum() - layout.counts
    columns = np.empty(len(decisions.steady), dtype=np.int64)
    columns[:] = decisions.steady
    places = layout.spans[is_steady] - len(decisions.own)
    columns[places] = result.token_ids.numpy()[firsts[is_steady]]
    decisions.steady[:] = columns.tolist()


def split_scored(layout: ScoreLayout, scores: Scores, decisions: list[Decision | None]) -> None:
    """Adds each span's scored prompt positions to its decision."""
    wanted = layout.logprob_counts.clip(min=0).repeat(layout.counts).tolist()
    entries = [entry for entry in _entries(scores, wanted) if entry is not None]
    at = 0
    for span, count in zip(layout.spans.tolist(), layout.counts.tolist(), strict=True):
        decision = decisions[span] or Decision([], [])
        decisions[span] = decision._replace(scores=entries[at : at + count])
        at += count


def _decided_entries(
    layout: DecideLayout, result: DecideResult, final: Sequence[bool]
) -> list[TokenLogprobs | None]:
    if result.logprobs is None:
        return []
    assert result.logprob_ids is not None
    assert result.ranks is not None
    wanted = layout.logprob_counts.repeat(layout.counts).tolist()
    size = len(wanted)
    columns = (result.logprobs, result.logprob_ids, result.ranks)
    own: list[torch.Tensor] = [column[:size] for column in columns]
    return _entries(
        Scores(*own), [k if done else -1 for k, done in zip(wanted, final, strict=False)]
    )


def _entries(scores: Scores, wanted: list[int]) -> list[TokenLogprobs | None]:
    """One entry per row of `scores`, cut to `wanted` alternatives; None where that is negative."""
    columns = zip(
        wanted, scores.ids.tolist(), scores.logprobs.tolist(), scores.ranks.tolist(), strict=True
    )
    return [
        None if k < 0 else TokenLogprobs(tuple(ids[: k + 1]), tuple(logprobs[: k + 1]), rank)
        for k, ids, logprobs, rank in columns
    ]
