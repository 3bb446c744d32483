"""Spans of one service and their way to a collector.

It does not know what is traced; without an exporter it costs nothing and passes contexts on.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from tidemill import __version__
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest
from tidemill.telemetry.context import TraceContext, epoch_offset_ns
from tidemill.telemetry.semconv import SCHEMA_URL, Attributes, duplicated, with_old_names

_EXPORT_S = 3
"""For one batch."""
_STOP_S = 4.0
"""What a collector that is gone, or never answers, may add to a shutdown."""
MAX_LINKS = 128
"""More links, or events, of one span are dropped by those who read them."""
_LOG = logging.getLogger("tidemill.trace")


class Span:
    """A span in the making. `context` goes to whoever is called.

    Times are monotonic nanoseconds (None: now). A root takes down how far the wall clock is from
    the monotonic one, and its children keep to that: a clock that is set meanwhile neither
    stretches a span nor moves a child out of its parent. Without an exporter, or in an unsampled
    trace, a span only passes the caller's context on.
    """

    __slots__ = ("_offset_ns", "_recorded", "_tracer", "context")

    def __init__(
        self,
        tracer: Tracer,
        context: TraceContext | None,
        recorded: Any = None,
        offset_ns: int = 0,
    ) -> None:
        self._tracer = tracer
        self._recorded = recorded
        self._offset_ns = offset_ns
        self.context = context

    @property
    def recording(self) -> bool:
        return self._recorded is not None

    def child(self, name: str, *, kind: str = "INTERNAL", start_ns: int | None = None) -> Span:
        if self._recorded is None:
            return self
        return self._tracer._record(name, self.context, kind, start_ns, self._offset_ns)

    def event(self, name: str, at_ns: int, attributes: Attributes) -> None:
        """Something that happened within it."""
        if self._recorded is not None:
            self._recorded.add_event(name, attributes, at_ns + self._offset_ns)

    def end(
        self,
        *,
        attributes: Attributes | None = None,
        error: str | None = None,
        end_ns: int | None = None,
        name: str | None = None,
    ) -> None:
        """Call once on each path, abort included; `error` is the text of a failed span, `name` a
        better one than it had at its start."""
        if self._recorded is None:
            return
        self._recorded.set_attributes(with_old_names(attributes or {}, self._tracer.old_names))
        if name is not None:
            self._recorded.update_name(name)
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._recorded.set_status(Status(StatusCode.ERROR, error))
        at_ns = time.monotonic_ns() if end_ns is None else end_ns
        self._recorded.end(at_ns + self._offset_ns)


def checked_ratio(share: float) -> float:
    """The same; raises InvalidRequest for what is no share."""
    if 0 <= share <= 1:
        return share
    raise InvalidRequest(
        f"the share of traced requests is {share:g}; it must be within 0 and 1",
        param="trace_sample_ratio",
    )


class Tracer:
    """Starts spans of one service. The exporter runs on a thread and connection of its own, so a
    collector that is missing or slow delays nothing: what it does not take is dropped."""

    def __init__(self, service: str, endpoint: str | None, *, sample_ratio: float = 1.0) -> None:
        """`endpoint` None: no exporter, and nothing of OpenTelemetry is imported. `sample_ratio`
        of the requests that come without a trace are traced; others are as their caller says.
        Raises FailedPrecondition for an endpoint or variables that OpenTelemetry cannot read."""
        self._provider: Any = None
        self._sample_ratio = checked_ratio(sample_ratio)
        self.old_names = duplicated()
        if endpoint is None:
            return
        try:
            self._provider = _provider(service, endpoint)
        except Exception as failure:  # the library has no type of its own for what it cannot read
            why = str(failure).rstrip(".")
            raise FailedPrecondition(
                f"traces cannot be sent to {endpoint}: {why}; correct --otlp-endpoint, for example "
                "http://127.0.0.1:4317, or the variable OTEL_* that is meant",
                param="otlp_endpoint",
            ) from failure
        self._tracer = self._provider.get_tracer("tidemill", __version__, SCHEMA_URL)

    @property
    def exports(self) -> bool:
        """Whether any span of its can be seen."""
        return self._provider is not None

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        kind: str = "SERVER",
        start_ns: int | None = None,
    ) -> Span:
        """A span below `parent`, or of a new trace; kind is SERVER, CLIENT or INTERNAL.

        Whoever is called is told of a new trace that is not sampled, so that it starts none.
        """
        if self._provider is None or (parent is not None and not parent.sampled):
            return Span(self, parent)
        if parent is None and random.random() >= self._sample_ratio:
            return Span(self, TraceContext(random.getrandbits(128), random.getrandbits(64), False))
        return self._record(name, parent, kind, start_ns, epoch_offset_ns())

    def start_linked(self, name: str, members: Sequence[TraceContext], *, start_ns: int) -> Span:
        """An INTERNAL span of a trace of its own that names those it worked for."""
        if self._provider is None:
            return Span(self, None)
        from opentelemetry import trace

        links = [trace.Link(_above(one)) for one in members[:MAX_LINKS]]
        return self._record(name, None, "INTERNAL", start_ns, epoch_offset_ns(), links)

    def _record(
        self,
        name: str,
        parent: TraceContext | None,
        kind: str,
        start_ns: int | None,
        offset_ns: int,
        links: Sequence[Any] = (),
    ) -> Span:
        from opentelemetry import context, trace

        around = context.Context()
        if parent is not None:
            around = trace.set_span_in_context(trace.NonRecordingSpan(_above(parent)), around)
        at_ns = time.monotonic_ns() if start_ns is None else start_ns
        made = self._tracer.start_span(
            name,
            context=around,
            kind=trace.SpanKind[kind],
            start_time=at_ns + offset_ns,
            links=links,
        )
        own, state = made.get_span_context(), parent.state if parent else ""
        return Span(self, TraceContext(own.trace_id, own.span_id, True, state), made, offset_ns)

    def stop(self) -> None:
        """Sends what has ended, for a few seconds at most; blocks, so call it from a thread."""
        if self._provider is None:
            return
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(_STOP_S)
        if sending.is_alive():
            _LOG.warning("the collector did not take the last spans within %g s", _STOP_S)


def _provider(service: str, endpoint: str) -> Any:
    """Raises what the library does."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider, sampling
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    plain = not endpoint.startswith("https")
    _check_host(endpoint)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=plain, timeout=_EXPORT_S)
    facts = Resource.create({"service.name": service, "service.version": __version__})
    # What operators say comes last: by itself the library lets a program's own words win.
    resource = facts.merge(OTELResourceDetector().detect())
    provider = TracerProvider(sampler=sampling.ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _check_host(endpoint: str) -> None:
    """Raises ValueError for what nobody can be called by, which the library takes."""
    asked = urlsplit(endpoint)
    if asked.scheme in ("http", "https") and (not asked.hostname or asked.port == 0):
        raise ValueError("it names no host, or a port that nobody has")


def _above(parent: TraceContext) -> Any:
    from opentelemetry import trace

    return trace.SpanContext(
        parent.trace_id,
        parent.span_id,
        is_remote=True,
        trace_flags=trace.TraceFlags(1),
        trace_state=trace.TraceState.from_header([parent.state]),
    )
