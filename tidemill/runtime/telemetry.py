"""W3C trace context and spans, given explicitly and never taken from the surroundings.

It does not know what is traced; without an exporter it costs nothing and passes contexts on.
"""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

Attributes = dict[str, str | int | float | bool]
_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_EXPORT_S = 3  # per batch; also what a collector that is gone adds to a shutdown


class TraceContext(NamedTuple):
    """One place in a trace, as `traceparent` and `tracestate` carry it between services."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """None for an absent or malformed header, which starts a new trace (W3C trace-context 1)."""
    found = _HEADER.fullmatch(traceparent.strip())
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return (
        TraceContext(trace_id, span_id, bool(flags & 1), tracestate) if trace_id * span_id else None
    )


def epoch_ns(monotonic_ns: int) -> int:
    """Wall-clock time of a monotonic one; calibrated anew, because clocks are slewed."""
    return time.time_ns() - time.monotonic_ns() + monotonic_ns


class Span:
    """A span in the making. `context` goes to whoever is called; times are epoch nanoseconds.

    Without an exporter, or in an unsampled trace, it only passes the caller's context on.
    """

    def __init__(self, tracer: Tracer, context: TraceContext | None, recorded: Any = None) -> None:
        self._tracer = tracer
        self._recorded = recorded
        self.context = context

    @property
    def recording(self) -> bool:
        return self._recorded is not None

    def child(self, name: str, *, kind: str = "INTERNAL", start_ns: int | None = None) -> Span:
        if self._recorded is None:
            return self
        return self._tracer.start(name, self.context, kind=kind, start_ns=start_ns)

    def end(
        self,
        *,
        attributes: Attributes | None = None,
        error: str | None = None,
        end_ns: int | None = None,
    ) -> None:
        """Call once on each path, abort included; `error` is the text of a failed span."""
        if self._recorded is None:
            return
        self._recorded.set_attributes(attributes or {})
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._recorded.set_status(Status(StatusCode.ERROR, error))
        self._recorded.end(end_ns)


class Tracer:
    """Starts spans of one service. The exporter runs on a thread and connection of its own, so a
    missing collector delays nothing."""

    def __init__(self, service: str, endpoint: str | None) -> None:
        """`endpoint` None: no exporter, and nothing of OpenTelemetry is imported."""
        self._provider: Any = None
        if endpoint is None:
            return
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider, sampling
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        plain = not endpoint.startswith("https")
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=plain, timeout=_EXPORT_S)
        self._provider = TracerProvider(
            sampler=sampling.ALWAYS_ON,
            resource=Resource({"service.name": service}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tidemill")

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        kind: str = "SERVER",
        start_ns: int | None = None,
    ) -> Span:
        """A span below `parent`, or of a new trace; kind is SERVER, CLIENT or INTERNAL."""
        if self._provider is None or (parent is not None and not parent.sampled):
            return Span(self, parent)
        from opentelemetry import context, trace

        around = context.Context()
        if parent is not None:
            above = trace.SpanContext(
                parent.trace_id,
                parent.span_id,
                is_remote=True,
                trace_flags=trace.TraceFlags(1),
                trace_state=trace.TraceState.from_header([parent.state]),
            )
            around = trace.set_span_in_context(trace.NonRecordingSpan(above), around)
        made = self._tracer.start_span(
            name, context=around, kind=trace.SpanKind[kind], start_time=start_ns
        )
        own, state = made.get_span_context(), parent.state if parent else ""
        return Span(self, TraceContext(own.trace_id, own.span_id, True, state), made)

    def stop(self) -> None:
        """Sends what has ended, for a few seconds at most; blocks, so call it from a thread."""
        if self._provider is not None:
            self._provider.shutdown()
