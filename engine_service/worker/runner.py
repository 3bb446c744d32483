"""Runs one step: tables, forward, logits, decisions.

It does not know methods' names, requests or how a plan came about: it asks each span's strategy
to decide and hands back what was decided. Steps that fit a captured CUDA graph replay it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from engine_service.core.step import Decisions, NewRow, Span, SteadyRows, StepPlan
from engine_service.core.strategy import KeyChoice
from engine_service.launching import LAUNCH_BOUND
from engine_service.stages import Heard
from engine_service.staging import HostCopies, stage
from engine_service.worker.batch import ForwardBatch, bind_batch, columns_of
from engine_service.worker.decisions import split_decided, split_scored
from engine_service.worker.graphs import StepGraphs
from engine_service.worker.layout import StepLayout, lay_out, numbered
from engine_service.worker.outcome import Outcome, Telling, write_tokens
from engine_service.worker.pooling import split_pooled
from engine_service.worker.program import States, StepProgram


@dataclass(slots=True, eq=False)
class StepHandle:
    """A launched step: results on their way to the host, and whose they are."""

    num_own: int
    num_steady: int
    copies: HostCopies
    made: list[tuple[StepLayout, Outcome]] = field(default_factory=list)
    awaited: list[tuple[StepLayout, Heard]] = field(default_factory=list)
    """Of another stage."""


class Runner:
    """Launches plans on one device. Steps run in order; `collect` waits for its own only."""

    def __init__(
        self, program: StepProgram, *, logit_chunk: int, graphs: StepGraphs | None = None
    ) -> None:
        """Without `graphs` every kernel is launched by itself."""
        self._program = program
        self._tables = program.tables
        self._logit_chunk = logit_chunk
        self._graphs = graphs
        self._telling = Telling(program.model.traits, program.strategies)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step; on an asynchronous device it returns before the step is done."""
        device = self._tables.device
        # CUDA's current device is the thread's own, and a library is called from any.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._launch(plan)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> StepHandle:
        self._tables.apply(plan.new_rows, plan.page_appends, plan.masks)
        self._admit(plan.new_rows)
        num_own = len(plan.own_spans)
        copies = HostCopies(self._tables.device)
        handle = StepHandle(num_own, plan.num_spans - num_own, copies)
        if not plan.num_spans:
            return handle
        for layout in self._shares(plan) or [self._lay_out(plan.own_spans, plan.steady)]:
            result = None if self._graphs is None else self._graphs.run(layout)
            if result is None:
                self._run_in_parts(layout, handle)
            else:
                handle.made.append((layout, Outcome([result]).each(handle.copies.add)))
            self._tables.pages.told(layout.rows)
        handle.copies.seal()
        return handle

    @torch.inference_mode()
    def collect(self, handle: StepHandle) -> Decisions:
        """Waits for the step, and for the stage that decides in it."""
        handle.copies.wait()
        for layout, heard in handle.awaited:
            outcome = self._telling.unpack(layout, heard.wait())
            write_tokens(self._tables, layout, outcome)
            handle.made.append((layout, outcome))
        decisions = Decisions([None] * handle.num_own, [0] * handle.num_steady)
        for layout, outcome in handle.made:
            for part, result in zip(layout.decides, outcome.decided, strict=True):
                split_decided(part, result, decisions)
            if layout.scores is not None and outcome.scores is not None:
                split_scored(layout.scores, outcome.scores, decisions.own)
            if layout.pools is not None and outcome.pooled is not None:
                split_pooled(layout.pools, outcome.pooled, decisions.own)
        return decisions

    def close(self, *, shares_layers: bool = False) -> None:
        """Behind the last step. Graphs are given up, which takes as long as the device does: not
        where it waits for a stage that is gone, unless collectives of `shares_layers` are in them,
        which nobody can leave before."""
        links = self._program.stage.links
        is_still = links is None or links.flush()
        if self._graphs is not None and (is_still or shares_layers):
            self._graphs.close()

    def _admit(self, new_rows: Sequence[NewRow]) -> None:
        for strategy in self._program.strategies if new_rows else ():
            mine = [new for new in new_rows if new.method == strategy.name]
            if mine:
                strategy.admit(mine)

    def _shares(self, plan: StepPlan) -> list[StepLayout]:
        """A step of both canvases aside of the pages and other spans as one step of either, if both
        are captured; they have no row in common. Nothing where the step is better run as one."""
        spans, graphs = plan.own_spans, self._graphs
        if graphs is None or plan.steady is not None:
            return []
        aside = [index for index, span in enumerate(spans) if span.aside]
        num_tokens = sum(span.num_tokens for span in spans)
        if not 0 < len(aside) < len(spans) or num_tokens > LAUNCH_BOUND:
            return []
        paged = [index for index, span in enumerate(spans) if not span.aside]
        shares = [self._lay_out([spans[index] for index in own]) for own in (paged, aside)]
        if not all(share.only_decides and graphs.has_room(share) for share in shares):
            return []
        return list(map(numbered, shares, map(np.array, (paged, aside))))

    def _lay_out(self, spans: Sequence[Span], steady: SteadyRows | None = None) -> StepLayout:
        return lay_out(
            spans,
            self._tables,
            logits_shift=self._program.model.traits.logits_shift,
            logit_chunk=self._logit_chunk,
            longest_first=self._tables.device.type == "cuda",
            choice_of=self._choice_of,
            steady=steady,
        )

    def _choice_of(self, span: Span) -> KeyChoice:
        method = self._tables.method_of_row[span.row]
        return self._program.strategies[method].choice_of(span)

    def _run_in_parts(self, layout: StepLayout, handle: StepHandle) -> None:
        """Launches what follows the forward, and the forward itself unless it is captured."""
        program, links = self._program, self._program.stage.links
        # First of all, so that the device computes while the rest is made.
        hidden = None if self._graphs is None else self._graphs.forward(layout)
        size = 0 if links is None else self._telling.size(layout)
        if not program.stage.is_last:
            if hidden is None:
                program.forward(self._bind(layout))
            if links is not None and size:
                handle.awaited.append((layout, links.hear(size)))
            return
        batch = self._bind(layout)
        states = program.states(batch) if hidden is None else States(hidden)
        outcome = self._make(batch, states)
        if links is not None and size:
            links.tell(self._telling.pack(layout, outcome))
        handle.made.append((layout, outcome.each(handle.copies.add)))

    def _bind(self, layout: StepLayout) -> ForwardBatch:
        staged = stage(columns_of(layout), self._tables.device)
        return bind_batch(layout, staged, self._tables)

    def _make(self, batch: ForwardBatch, states: States) -> Outcome:
        """What follows the forward."""
        program, outcome = self._program, Outcome()
        # Scores first: they read tokens that are known, decisions write new ones.
        if batch.scores is not None:
            outcome.scores = program.score(batch.scores, states.hidden_TE, self._logit_chunk)
        if batch.pools is not None:
            outcome.pooled = program.pool(batch.pools, states.hidden_TE)
        for part in batch.decides:
            outcome.decided.append(program.decide(part, program.logits(part, states)))
        return outcome
