"""What the loop tells of itself beside its output: counts once a second, and traced steps.

It does not know who asked, nor what a trace is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine_service.core.messages import Event, SetTracing, StepTrace
from engine_service.core.planner import Planner
from engine_service.core.step import Memory, StepPlan

TALLY_S = 1.0
MAX_MEMBERS = 128
"""Traced sequences that a step names: readers of traces take no more links."""


class Watch:
    """launched, collected, take: called by the loop for every step; next to nothing while no step
    is traced."""

    def __init__(self, planner: Planner, memory: Callable[[], Memory]) -> None:
        self._planner = planner
        self._memory = memory
        self._asked = SetTracing(False, 0)
        self._open: dict[int, StepTrace] = {}
        self._closed: list[Event] = []
        self._told_at = 0.0
        self.is_tracing = False

    def ask(self, asked: SetTracing) -> None:
        """From now on these steps are traced."""
        self._asked = asked
        self.is_tracing = asked.members or asked.every > 0

    def launched(self, plan: StepPlan, planned_ns: int, launched_ns: int) -> None:
        """A step was planned from `planned_ns` on, and handed to the executor at `launched_ns`."""
        if not self.is_tracing:
            return
        members, every = self._asked
        keys = self._planner.traced_keys(MAX_MEMBERS) if members else []
        if keys or (every and plan.seq % every == 0):
            spans, steady = plan.own_spans, plan.num_spans - len(plan.own_spans)
            self._open[plan.seq] = StepTrace(
                seq=plan.seq,
                keys=tuple(keys),
                planned_ns=planned_ns,
                launched_ns=launched_ns,
                collected_ns=0,
                num_rows=plan.num_spans,
                num_new_rows=len(plan.new_rows),
                num_tokens=steady + sum(span.num_tokens for span in spans),
                num_decided=steady + sum(span.num_decided for span in spans),
            )

    def collected(self, plan: StepPlan) -> None:
        """The step's decisions are here."""
        opened = self._open.pop(plan.seq, None) if self._open else None
        if opened is not None:
            self._closed.append(opened._replace(collected_ns=time.monotonic_ns()))

    def take(self, now_s: float) -> list[Event]:
        """What there is to tell; `now_s` is monotonic."""
        news, self._closed = self._closed, []
        if now_s - self._told_at >= TALLY_S:
            self._told_at = now_s
            news.append(self._planner.counting.told(self._memory()))
        return news
