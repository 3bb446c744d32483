"""What is measured and traced of requests and steps. It changes nothing about them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from engine_service.config import EngineConfig
from engine_service.core.facts import EngineFacts
from engine_service.core.messages import Finish, RankTrace, SetTracing, StepTrace, Submit
from engine_service.limits import MAX_TRACE_LEVEL
from engine_service.server.metrics import EngineMetrics, Reading
from engine_service.server.request_trace import (
    TRANSFER_SPAN,
    RequestTrace,
    method_of,
    trace_refusal,
)
from engine_service.server.shares import Ended
from tidemill.runtime.errors import InvalidRequest, ServiceError
from tidemill.telemetry.context import TraceContext, parse
from tidemill.telemetry.tracer import Span, Tracer

STEPS_LEVEL = 2
RANKS_LEVEL = MAX_LEVEL = MAX_TRACE_LEVEL
_AWAITED = 64
"""Steps of which other ranks may still tell; they are a step or two behind."""


class _Watched:
    """One sequence from its submission to its end."""

    __slots__ = ("context", "key", "submit")

    def __init__(self, submit: Submit, context: TraceContext | None) -> None:
        self.submit = submit
        self.context = context
        self.key = 0


class Observer:
    """Owns the metrics, the trace level and the spans. Nothing is done per token."""

    def __init__(
        self,
        config: EngineConfig,
        tracer: Tracer,
        *,
        read: Callable[[], Reading],
        trace_steps: Callable[[SetTracing], None],
    ) -> None:
        """`trace_steps` tells the core which steps to take down; raises InvalidRequest for a
        trace level that does not exist."""
        self.metrics = EngineMetrics(read)
        self._tracer = tracer
        self._every = config.trace_step_every
        self._trace_steps = trace_steps
        self._live: dict[int, RequestTrace] = {}
        self._steps: OrderedDict[int, Span] = OrderedDict()
        self._level = _checked(config.trace_level)

    @property
    def trace_level(self) -> int:
        """0: no spans; 1: requests; 2: and steps; 3: and blocks and all ranks."""
        return self._level

    def set_trace_level(self, level: int) -> None:
        """From the next request and step on; raises InvalidRequest for one outside of 0 to 3."""
        self._level = _checked(level)
        self.tell_core()

    def tell_core(self) -> None:
        """What the core is to take down of its steps; call it when the core is ready."""
        is_on = self._tracer.exports and self._level > 0
        steps, ranks = (is_on and self._level >= level for level in (STEPS_LEVEL, RANKS_LEVEL))
        self._trace_steps(SetTracing(steps, self._every if is_on else 0, ranks))

    def refused(
        self, error: ServiceError, facts: EngineFacts | None, method: str, parent: tuple[str, str]
    ) -> None:
        """A request of `method` was refused before it was a sequence of the core's."""
        self.metrics.rejected("" if facts is None else facts.model_id, error)
        if self._level > 0 and self._tracer.exports:
            trace_refusal(self._tracer.start(method, parse(*parent)), method, error)

    def begin(
        self, submit: Submit, parent: tuple[str, str], facts: EngineFacts
    ) -> tuple[Submit, Ended, Callable[[int], None]]:
        """Opens the span below (traceparent, tracestate).

        Returns the sequence as the core is to see it, what is to be told of its end, and what is
        to be told of its key.
        """
        above = parse(*parent)
        trace: RequestTrace | None = None
        watched = _Watched(submit, above)
        if self._level > 0 and self._tracer.exports:
            name, kind = method_of(submit), "SERVER"
            if submit.only_prefills:
                name, kind = "engine.compute", "INTERNAL"
            span = self._tracer.start(name, above, kind=kind, start_ns=submit.arrival_ns)
            if span.recording:
                watched.context = span.context
                watched.submit = submit = replace(submit, traced=True)
                trace = RequestTrace(span, submit, self._level)

        def ended(outcome: Finish | ServiceError) -> None:
            self._live.pop(watched.key, None)
            self.metrics.ended(facts.model_id, watched.submit, outcome, watched.context)
            if trace is not None:
                trace.ended(outcome)

        def began(key: int) -> None:
            watched.key = key
            if trace is not None:
                self._live[key] = trace

        return submit, ended, began

    def trace_of(self, key: int) -> RequestTrace | None:
        """Of a live sequence that is recorded."""
        return self._live.get(key)

    def sends(self, parent: tuple[str, str]) -> Span:
        """The SERVER span, below (traceparent, tracestate), of a transfer to another engine."""
        above, tracer = parse(*parent), self._tracer
        return tracer.start(TRANSFER_SPAN, above) if self._level else Span(tracer, above)

    def stepped(self, step: StepTrace | RankTrace) -> None:
        """The span of a step, linked with those it worked for, and each rank's part of it."""
        if isinstance(step, RankTrace):
            if above := self._steps.get(step.seq):
                _forward(above, step.rank, step.launched_ns, step.done_ns)
            return
        traces = [self._live[key] for key in step.keys if key in self._live]
        members = [one.span.context for one in traces if one.span.context is not None]
        span = self._tracer.start_linked("engine.step", members, start_ns=step.planned_ns)
        _forward(span, 0, step.launched_ns, step.collected_ns)
        self._steps[step.seq] = span
        if len(self._steps) > _AWAITED:
            self._steps.popitem(last=False)
        span.end(
            attributes={
                "tidemill.step": step.seq,
                "tidemill.rows": step.num_rows,
                "tidemill.new_rows": step.num_new_rows,
                "tidemill.tokens": step.num_tokens,
                "tidemill.decided": step.num_decided,
            },
            end_ns=step.collected_ns,
        )


def _forward(step: Span, rank: int, start_ns: int, end_ns: int) -> None:
    span = step.child("tp.forward", start_ns=start_ns)
    span.end(attributes={"tidemill.rank": rank}, end_ns=end_ns)


def _checked(level: int) -> int:
    if not 0 <= level <= MAX_LEVEL:
        raise InvalidRequest(
            f"trace level {level} does not exist; pass 0 (off) to {MAX_LEVEL}", param="trace_level"
        )
    return level
