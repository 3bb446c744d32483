"""A collector of traces as OpenTelemetry's are: it speaks OTLP over gRPC, in threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc


class Collector(collector_grpc.TraceServiceServicer):
    """Keeps every span; one that does not answer takes calls and keeps them waiting."""

    def __init__(self, *, answers: bool) -> None:
        self.spans: list[Any] = []
        self.services: dict[bytes, str] = {}
        """By span id."""
        self.schemas: set[str] = set()
        self.num_calls = 0
        self.released = threading.Event()
        if answers:
            self.released.set()

    def Export(self, request: Any, context: Any) -> Any:
        self.num_calls += 1
        self.released.wait()
        for resource in request.resource_spans:
            facts = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.schemas.add(scope.schema_url)
                self.spans += scope.spans
                for span in scope.spans:
                    self.services[span.span_id] = facts["service.name"]
        return collector_pb.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[Any]:
        """Spans of one trace, by its hexadecimal id."""
        return [span for span in self.spans if span.trace_id.hex() == trace_id]


def in_their_time() -> Any:
    """Spans that are made in this process meanwhile are sent, however slow the machine is."""
    return mock.patch.multiple("tidemill.telemetry.tracer", _EXPORT_S=60, _STOP_S=60.0)


@contextmanager
def collecting(*, answers: bool = True) -> Iterator[tuple[Collector, str]]:
    """A running collector and its endpoint. One that does not answer has no more time than the
    product gives it."""
    server = grpc.server(ThreadPoolExecutor(4))
    collector = Collector(answers=answers)
    collector_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with in_their_time() if answers else nullcontext():
            yield collector, f"http://127.0.0.1:{port}"
    finally:
        collector.released.set()
        server.stop(None).wait()


def values_of(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {a.key: _plain(a.value) for a in span.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind)
