"""One trace from the caller through the frontend into Submit; spans end on every path."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc

from tests.otlp import in_their_time
from tests.service.frontends import stack
from tests.waiting import until
from tidemill.client import AsyncClient
from tidemill.exchange import CallOptions
from tidemill.sampling_params import SamplingParams
from tidemill.telemetry.context import parse

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ABOVE = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{ABOVE}-01", f"00-{TRACE}-{ABOVE}-00"


class Collector(otlp_rpc.TraceServiceServicer):
    """Keeps every span it is sent."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.update({span.name: span for span in scope.spans})
        return otlp.ExportTraceServiceResponse()


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, keeper = grpc.aio.server(), Collector()
    otlp_rpc.add_TraceServiceServicer_to_server(keeper, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with in_their_time():
            yield keeper, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def assert_walk(spans: dict[str, Any], names: list[str], ingress: str) -> None:
    """The ingress below the caller, the others below the ingress, one trace."""
    assert {*names, ingress} <= set(spans)
    assert spans[ingress].parent_span_id.hex() == ABOVE
    assert spans[ingress].kind == 2
    for name in names:
        assert spans[name].parent_span_id == spans[ingress].span_id
        assert spans[name].end_time_unix_nano >= spans[name].start_time_unix_nano
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}


async def test_http_chat_is_one_trace(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with collector() as (keeper, endpoint):
        async with stack(tmp_path, otlp_endpoint=endpoint) as served:
            async with served.http() as client:
                headers = {"traceparent": SAMPLED, "tracestate": "a=b"}
                await client.post("/v1/chat/completions", json=body, headers=headers)
                await client.get("/health")
            (spec,) = served.engine.submits
        spans = keeper.spans
        names = ["apply_chat_template", "tokenize", "chat fake"]
        assert_walk(spans, names, "POST /v1/chat/completions")
        sent = parse(spec.traceparent)
        assert sent is not None
        assert f"{sent.span_id:016x}" == spans["chat fake"].span_id.hex()
        assert f"{sent.trace_id:032x}" == TRACE
        assert spec.tracestate == "a=b"
        assert spans["chat fake"].kind == 3
        found = {a.key: a.value for a in spans["chat fake"].attributes}
        assert found["gen_ai.usage.output_tokens"].int_value == 3
        assert found["gen_ai.operation.name"].string_value == "chat"


async def test_grpc_streams_and_aborts_end_their_spans(tmp_path: Path) -> None:
    async with collector() as (keeper, endpoint):
        async with stack(tmp_path, otlp_endpoint=endpoint) as served:
            served.engine.step_s = 0.01
            async with AsyncClient(served.grpc_address) as client:
                options = CallOptions(traceparent=SAMPLED)
                chosen = SamplingParams(max_tokens=400)
                async for _ in client.generate_stream("ab", chosen, options):
                    break
                await until(lambda: not (served.engine.live or served.frontend.desk.num_live))
        names = ["tokenize", "text_completion fake"]
        assert_walk(keeper.spans, names, "tidemill.v1.TextService/GenerateStream")
        assert keeper.spans["text_completion fake"].status.message == "aborted"


async def test_unsampled_contexts_are_passed_on_and_nothing_is_recorded(tmp_path: Path) -> None:
    async with collector() as (keeper, endpoint):
        async with stack(tmp_path, otlp_endpoint=endpoint) as served:
            async with served.http() as client:
                body = {"prompt": "a", "max_tokens": 1}
                headers = {"traceparent": UNSAMPLED}
                await client.post("/v1/completions", json=body, headers=headers)
            (spec,) = served.engine.submits
        assert spec.traceparent == UNSAMPLED
        assert keeper.spans == {}


async def test_without_an_exporter_the_callers_context_is_passed_on(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        async with served.http() as client:
            body = {"prompt": "a", "max_tokens": 1}
            await client.post("/v1/completions", json=body, headers={"traceparent": SAMPLED})
            await client.post("/v1/completions", json=body)
        assert [spec.traceparent for spec in served.engine.submits] == [SAMPLED, ""]


def value_of(page: str, series: str) -> float:
    """Of the one sample whose name and labels begin so."""
    (line,) = (line for line in page.splitlines() if line.startswith(series))
    return float(line.rpartition(" ")[2])


async def test_embeddings_are_traced_and_counted_like_texts(tmp_path: Path) -> None:
    async with (
        collector() as (keeper, endpoint),
        stack(tmp_path, otlp_endpoint=endpoint) as served,
        served.http() as client,
    ):
        for given, traceparent in (("ab", SAMPLED), ("a" * 5000, UNSAMPLED)):
            headers = {"traceparent": traceparent}
            await client.post("/v1/embeddings", json={"input": given}, headers=headers)
        page = (await client.get("/metrics")).text
    assert_walk(keeper.spans, ["tokenize", "embeddings fake"], "POST /v1/embeddings")
    series = 'gen_ai_server_request_duration_seconds_count{error_type="%s",'
    for error in ("", "context_length_exceeded"):
        of_embeddings = series % error + 'gen_ai_operation_name="embeddings"'
        assert value_of(page, of_embeddings) == 1, error


async def test_choices_that_are_made_side_by_side_do_not_make_tokens_faster(tmp_path: Path) -> None:
    """The time per output token of eight choices is that of one, not an eighth of it."""
    async with stack(tmp_path) as served, served.http() as client:
        served.engine.step_s = 0.03
        body = {"prompt": "ab", "max_tokens": 20, "n": 8}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        page = (await client.get("/metrics")).text
    for name in ("gen_ai_server_time_per_output_token", "tidemill_request_time_per_output_token"):
        assert value_of(page, f"{name}_seconds_count") == 1
        assert value_of(page, f"{name}_seconds_sum") > 0.01, "an eighth is 0.004"
