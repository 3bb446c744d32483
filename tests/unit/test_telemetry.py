"""Trace contexts and spans; the collector is real (OTLP over gRPC), in process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.otlp import collecting, values_of
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest
from tidemill.telemetry import semconv
from tidemill.telemetry.context import TraceContext, parse
from tidemill.telemetry.tracer import Tracer

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_parse_and_print() -> None:
    context = parse(HEADER, "vendor=1")
    assert context is not None
    assert (context.traceparent, context.state, context.sampled) == (HEADER, "vendor=1", True)
    assert parse(HEADER, "v=" + "1" * 510) == context._replace(state="v=" + "1" * 510)
    assert parse(HEADER, "v=" + "1" * 511) == context._replace(state=""), "who calls sets its size"
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
        HEADER + "-more",
        HEADER + "," + HEADER,
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


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("OTEL_SERVICE_NAME", "mine", "mine"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=ours,team=a", "ours"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=a", "test"),
    ],
)
def test_an_operators_name_for_the_service_is_heeded(
    variable: str, value: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with collecting() as (collector, endpoint):
        tracer = Tracer("test", endpoint)
        tracer.start("work", None).end()
        tracer.stop()
        assert set(collector.services.values()) == {name}


@pytest.mark.parametrize(
    ("endpoint", "variable", "value"),
    [
        ("http://[::1", "", ""),
        ("http://", "", ""),
        ("https://:4317", "", ""),
        ("http://127.0.0.1:99999", "", ""),
        ("http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "3s"),
        ("http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("http://127.0.0.1:9", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
    ],
)
def test_what_opentelemetry_cannot_read_is_refused_by_name(
    endpoint: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is one of another type, which ended the start with a trace of Python's."""
    if variable:
        monkeypatch.setenv(variable, value)
    with pytest.raises(FailedPrecondition, match="correct --otlp-endpoint") as refused:
        Tracer("test", endpoint)
    assert refused.value.param == "otlp_endpoint"
    assert endpoint in refused.value.message


def test_a_missing_collector_delays_neither_start_nor_stop_for_long() -> None:
    """Neither waits for the minute and more for which the exporter would try by itself."""
    began = time.monotonic()
    tracer = Tracer("test", "http://127.0.0.1:9")
    tracer.start("work", None).end()
    assert time.monotonic() - began < 20
    tracer.stop()
    assert time.monotonic() - began < 30


def test_a_collector_that_never_answers_delays_neither_spans_nor_the_end_for_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The end is told from that of an exporter that gives up by itself by what is logged."""
    with collecting(answers=False) as (collector, endpoint):
        tracer = Tracer("test", endpoint)
        began = time.monotonic()
        for _ in range(5000):  # more than the queue holds: the rest is dropped
            tracer.start("work", None).end()
        assert time.monotonic() - began < 20
        tracer.stop()
        assert time.monotonic() - began < 30
        assert "did not take the last spans within 4 s" in caplog.text
        assert collector.num_calls > 0


def test_an_exporter_on_the_callers_thread_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control of the one above: two spans alone take this long, 5,000 take hours."""
    monkeypatch.setattr("opentelemetry.sdk.trace.export.BatchSpanProcessor", SimpleSpanProcessor)
    with collecting(answers=False) as (_, endpoint):
        tracer = Tracer("test", endpoint)
        began = time.monotonic()
        for _ in range(2):
            tracer.start("work", None).end()
        assert time.monotonic() - began > 3


def test_a_share_of_new_traces_is_recorded_and_callers_decide_about_theirs() -> None:
    with collecting() as (collector, endpoint):
        tracer = Tracer("test", endpoint, sample_ratio=0.25)
        roots = [tracer.start("root", None) for _ in range(1000)]
        for root in roots:
            root.child("part").end()
            root.end()
        for _ in range(20):
            tracer.start("sampled", parse(HEADER)).end()
            tracer.start("unsampled", parse(HEADER[:-1] + "0")).end()
        tracer.stop()
    num_recorded = sum(root.recording for root in roots)
    assert 150 < num_recorded < 350
    for root in roots:
        assert root.context is not None
        assert root.context.sampled is root.recording
        assert parse(root.context.traceparent) == root.context
    names = [span.name for span in collector.spans]
    assert names.count("root") == names.count("part") == num_recorded
    assert (names.count("sampled"), names.count("unsampled")) == (20, 0)
    for wrong in (-0.1, 1.1):
        with pytest.raises(InvalidRequest, match="within 0 and 1"):
            Tracer("test", None, sample_ratio=wrong)


def test_a_set_clock_neither_stretches_spans_nor_moves_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, ahead = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + ahead[0])
    hour = 3600 * 10**9
    with collecting() as (collector, endpoint):
        tracer = Tracer("test", endpoint)
        span = tracer.start("work", None)
        ahead[0] = hour
        span.child("part").end()
        span.end()
        tracer.start("later", None).end()
        tracer.stop()
    part, work, later = collector.spans
    assert work.start_time_unix_nano <= part.start_time_unix_nano
    assert part.end_time_unix_nano <= work.end_time_unix_nano
    assert work.end_time_unix_nano - work.start_time_unix_nano < hour / 60
    assert later.start_time_unix_nano - work.start_time_unix_nano > hour / 2


def test_links_are_bounded_and_lead_to_members() -> None:
    with collecting() as (collector, endpoint):
        tracer = Tracer("test", endpoint)
        members = [TraceContext(1 + i, 2 + i, True) for i in range(200)]
        tracer.start_linked("step", members, start_ns=time.monotonic_ns()).end()
        tracer.stop()
    (step,) = collector.spans
    assert len(step.links) == 128
    assert int(step.links[7].trace_id.hex(), 16) == 8
    assert int(step.links[7].span_id.hex(), 16) == 9
    assert step.parent_span_id == b""
    assert collector.schemas == {semconv.SCHEMA_URL}


def test_old_names_stand_beside_the_new_ones_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rpc: semconv.Attributes = {
        semconv.RPC_METHOD: "a.B/C",
        semconv.RPC_STATUS: "DEADLINE_EXCEEDED",
    }
    for opt_in, wanted in (
        ("", None),
        ("rpc", None),
        ("http/dup", None),
        ("gen_ai_latest_experimental, rpc/dup", 4),
    ):
        monkeypatch.setenv(semconv.OPT_IN, opt_in)
        with collecting() as (collector, endpoint):
            tracer = Tracer("test", endpoint)
            tracer.start("work", None).end(attributes=rpc)
            tracer.stop()
        (span,) = collector.spans
        found = values_of(span)
        assert found[semconv.RPC_METHOD] == "a.B/C"
        assert found.get("rpc.grpc.status_code") == wanted
        assert ("rpc.service" in found) is (wanted is not None)
