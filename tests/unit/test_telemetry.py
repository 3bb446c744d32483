"""Trace contexts and spans; the collector is real (OTLP over gRPC), in process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc

from tidemill.telemetry.context import TraceContext, parse
from tidemill.telemetry.tracer import Tracer

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(collector_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list = []
        self.arrived = threading.Event()

    def Export(self, request, context):  # type: ignore[no-untyped-def]
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.arrived.set()
        return collector_pb.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    collector_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_parse_and_print() -> None:
    context = parse(HEADER, "vendor=1")
    assert context is not None
    assert (context.traceparent, context.state, context.sampled) == (HEADER, "vendor=1", True)
    later = parse(HEADER.replace("00-", "01-", 1) + "-more")
    assert later is not None
    assert later.trace_id == context.trace_id


@pytest.mark.parametrize(
    "odd",
    [
        "",
        "nonsense",
        HEADER.upper(),
        HEADER[:-1],
        "ff" + HEADER[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
    ],
)
def test_malformed_headers_start_a_new_trace(odd: str) -> None:
    assert parse(odd) is None


def test_without_an_exporter_the_caller_is_passed_on() -> None:
    above = parse(HEADER)
    span = Tracer("test", None).start("work", above)
    assert span.context == above
    assert not span.recording
    assert span.child("part").context == above
    span.end(error="no effect")
    Tracer("test", None).stop()


def test_nothing_of_opentelemetry_is_imported_without_an_exporter() -> None:
    code = (
        "import sys; from tidemill.telemetry.tracer import Tracer; Tracer('x', None).start('y', "
        "None).end(); sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_spans_reach_a_collector_with_their_parents_and_times() -> None:
    with collecting() as (collector, endpoint):
        tracer = Tracer("test", endpoint)
        above = parse(HEADER, "vendor=1")
        started = time.monotonic_ns() - 5_000_000
        span = tracer.start("work", above, start_ns=started)
        span.child("part", start_ns=started).end(end_ns=started + 2_000_000)
        span.end(attributes={"n": 3}, error="broken")
        unsampled = tracer.start("silent", TraceContext(1, 2, False))
        assert unsampled.context == TraceContext(1, 2, False)
        unsampled.end()
        tracer.stop()
        part, work = collector.spans
        assert {one.trace_id.hex() for one in (part, work)} == {HEADER[3:35]}
        assert work.parent_span_id.hex() == HEADER[36:52]
        assert part.parent_span_id == work.span_id
        assert part.end_time_unix_nano - part.start_time_unix_nano == 2_000_000
        assert abs(time.time_ns() - work.start_time_unix_nano) < 60_000_000_000
        assert (work.status.message, work.trace_state) == ("broken", "vendor=1")
        assert span.context is not None
        assert span.context.state == "vendor=1"


def test_a_missing_collector_delays_neither_start_nor_stop_for_long() -> None:
    """Neither waits for the minute and more for which the exporter would try by itself."""
    began = time.monotonic()
    tracer = Tracer("test", "http://127.0.0.1:9")
    tracer.start("work", None).end()
    assert time.monotonic() - began < 3
    tracer.stop()
    assert time.monotonic() - began < 8
