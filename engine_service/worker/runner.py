"""Runs one step: tables, forward, logits, decisions.

It does not know methods' names, requests or how a plan came about: it asks each span's strategy
to decide and hands back what was decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine_service.attention.base import AttentionBackend, LayerCache, plan_step
from engine_service.core.step import Decision, NewRow, StepPlan, TokenLogprobs
from engine_service.core.strategy import DecodeStrategy
from engine_service.models.base import CausalModel
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.sampling.logprobs import Scores, score_tokens
from engine_service.staging import HostCopies
from engine_service.worker.batch import DecidePart, ForwardBatch, ScorePart, build_batch
from engine_service.worker.tables import RowTables


@dataclass(slots=True, eq=False)
class StepHandle:
    """A launched step: results on their way to the host, and whose they are."""

    num_spans: int
    copies: HostCopies
    decided: list[tuple[DecidePart, DecideResult]] = field(default_factory=list)
    scored: tuple[ScorePart, Scores] | None = None


class Runner:
    """Launches plans on one device. Steps run in order; `collect` waits for its own only."""

    def __init__(
        self,
        *,
        model: CausalModel,
        backend: AttentionBackend,
        caches: Sequence[LayerCache],
        tables: RowTables,
        strategies: Sequence[DecodeStrategy],
        logit_chunk: int,
    ) -> None:
        """`strategies` are in the order of the tables' methods."""
        self._model = model
        self._backend = backend
        self._caches = caches
        self._tables = tables
        self._strategies = strategies
        self._logit_chunk = logit_chunk

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step; on an asynchronous device it returns before the step is done."""
        self._tables.apply(plan.new_rows, plan.page_appends)
        self._admit(plan.new_rows)
        handle = StepHandle(len(plan.spans), HostCopies(self._tables.device))
        if not plan.spans:
            return handle
        batch = build_batch(
            plan.spans,
            self._tables,
            logits_shift=self._model.traits.logits_shift,
            logit_chunk=self._logit_chunk,
        )
        hidden = self._forward(batch)
        # Scores first: they read tokens that are known, decisions write new ones.
        if batch.scores is not None:
            handle.scored = batch.scores, self._score(batch.scores, hidden, handle.copies)
        for part in batch.decides:
            handle.decided.append((part, self._decide(part, hidden, handle.copies)))
        handle.copies.seal()
        return handle

    def collect(self, handle: StepHandle) -> list[Decision | None]:
        """Waits for the step; one entry per span, None where nothing was decided or scored."""
        handle.copies.wait()
        decisions: list[Decision | None] = [None] * handle.num_spans
        for part, result in handle.decided:
            _split_decided(part, result, decisions)
        if handle.scored is not None:
            _split_scored(*handle.scored, decisions)
        return decisions

    def _admit(self, new_rows: Sequence[NewRow]) -> None:
        for strategy in self._strategies if new_rows else ():
            mine = [new for new in new_rows if new.method == strategy.name]
            if mine:
                strategy.admit(mine)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        windows = self._model.traits.windows
        step = plan_step(self._backend, batch.attention, windows=windows, caches=self._caches)
        return self._model(batch.input_ids, batch.attention.positions, step)

    def _decide(self, part: DecidePart, hidden: torch.Tensor, copies: HostCopies) -> DecideResult:
        result: DecideResult = self._strategies[part.method].decide(
            DecideBatch(
                logits_NV=self._model.logits(hidden.index_select(0, part.queries)),
                rows=part.rows,
                positions=part.positions,
                span_rows=part.span_rows,
                cu_decide=part.cu_decide,
                tables=self._tables.sampling,
                wants=part.wants,
                max_position=part.max_position,
            )
        )
        logprobs, ids, ranks = result.logprobs, result.logprob_ids, result.ranks
        return DecideResult(
            token_ids=copies.add(result.token_ids),
            final=copies.add(result.final),
            logprobs=None if logprobs is None else copies.add(logprobs),
            logprob_ids=None if ids is None else copies.add(ids),
            ranks=None if ranks is None else copies.add(ranks),
        )

    def _score(self, part: ScorePart, hidden: torch.Tensor, copies: HostCopies) -> Scores:
        count = max(0, int(part.logprob_counts.max()))
        pieces = [
            score_tokens(self._model.logits(hidden.index_select(0, queries)).float(), ids, count)
            for queries, ids in zip(
                part.queries.split(self._logit_chunk),
                part.token_ids.split(self._logit_chunk),
                strict=True,
            )
        ]
        return Scores(*(copies.add(torch.cat(column)) for column in zip(*pieces, strict=True)))


def _split_decided(
    part: DecidePart, result: DecideResult, decisions: list[Decision | None]
) -> None:
    token_ids, final = result.token_ids.tolist(), result.final.tolist()
    entries: list[TokenLogprobs | None] = []
    if result.logprobs is not None:
        assert result.logprob_ids is not None
        assert result.ranks is not None
        scores = Scores(result.logprobs, result.logprob_ids, result.ranks)
        wanted = part.logprob_counts.repeat(part.counts).tolist()
        entries = _entries(
            scores, [k if done else -1 for k, done in zip(wanted, final, strict=True)]
        )
    at = 0
    for span, count, k in zip(
        part.spans.tolist(), part.counts.tolist(), part.logprob_counts.tolist(), strict=True
    ):
        own = slice(at, at + count)
        logprobs = None if k < 0 else entries[own]
        decisions[span] = Decision(token_ids[own], final[own], logprobs)
        at += count


def _split_scored(part: ScorePart, scores: Scores, decisions: list[Decision | None]) -> None:
    wanted = part.logprob_counts.clip(min=0).repeat(part.counts).tolist()
    entries = [entry for entry in _entries(scores, wanted) if entry is not None]
    at = 0
    for span, count in zip(part.spans.tolist(), part.counts.tolist(), strict=True):
        decision = decisions[span] or Decision([], [])
        decisions[span] = decision._replace(scores=entries[at : at + count])
        at += count


def _entries(scores: Scores, wanted: list[int]) -> list[TokenLogprobs | None]:
    """One entry per row of `scores`, cut to `wanted` alternatives; None where that is negative."""
    columns = zip(
        wanted, scores.ids.tolist(), scores.logprobs.tolist(), scores.ranks.tolist(), strict=True
    )
    return [
        None if k < 0 else TokenLogprobs(tuple(ids[: k + 1]), tuple(logprobs[: k + 1]), rank)
        for k, ids, logprobs, rank in columns
    ]
