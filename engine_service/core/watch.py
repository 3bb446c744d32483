"""What the loop tells of itself beside its output: counts once a second, and traced steps.

It does not know who asked, nor what a trace is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine_service.core.messages import Event, RankTrace, SetTracing, StepTrace
from engine_service.core.planner import Planner
from engine_service.core.step import Memory, StepPlan

TALLY_S = 1.0
MAX_MEMBERS = 128
"""Traced sequences that a step names: readers of traces take no more links."""


class Watch:
    """launching, collected, take: called by the loop for every step; next to nothing while no step
    is traced."""

    def __init__(
        self,
        planner: Planner,
        memory: Callable[[], Memory],
        others: Callable[[], Sequence[RankTrace]] = tuple,
    ) -> None:
        """`others`: what other ranks have told since the last time."""
        self._planner = planner
        self._memory = memory
        self._others = others
        self._early: list[RankTrace] = []
        self._asked = SetTracing(False, 0)
        self._open: dict[int, StepTrace] = {}
        self._closed: list[Event] = []
        self._told_at = 0.0
        self.is_tracing = False

    def ask(self, asked: SetTracing) -> None:
        """From now on these steps are traced."""
        self._asked = asked
        self.is_tracing = asked.members or asked.every > 0

    def launching(self, plan: StepPlan, planned_ns: int) -> StepPlan:
        """A step was planned from `planned_ns` on, and is handed to the executor now. Returns what
        the executor is to be handed."""
        members, every, ranks = self._asked
        keys = self._planner.traced_keys(MAX_MEMBERS) if members else []
        if keys or (every and plan.seq % every == 0):
            spans, steady = plan.own_spans, plan.num_spans - len(plan.own_spans)
            self._open[plan.seq] = StepTrace(
                seq=plan.seq,
                keys=tuple(keys),
                planned_ns=planned_ns,
                launched_ns=time.monotonic_ns(),
                collected_ns=0,
                num_rows=plan.num_spans,
                num_new_rows=len(plan.new_rows),
                num_tokens=steady + sum(span.num_tokens for span in spans),
                num_decided=steady + sum(span.num_decided for span in spans),
            )
            if ranks:
                return replace(plan, is_timed=True)
        return plan

    def collected(self, plan: StepPlan) -> None:
        """The step's decisions are here."""
        opened = self._open.pop(plan.seq, None) if self._open else None
        if opened is not None:
            self._closed.append(opened._replace(collected_ns=time.monotonic_ns()))

    def take(self, now_s: float) -> list[Event]:
        """What there is to tell; `now_s` is monotonic."""
        news, self._closed = self._closed, []
        if self._asked.ranks:
            news += self._of_others()
        if now_s - self._told_at >= TALLY_S:
            self._told_at = now_s
            news.append(self._planner.counting.told(self._memory()))
        return news

    def _of_others(self) -> list[RankTrace]:
        """Behind their step: another rank may be done with it before this one is."""
        told = [*self._early, *self._others()]
        self._early = [one for one in told if one.seq in self._open]
        return [one for one in told if one.seq not in self._open]
