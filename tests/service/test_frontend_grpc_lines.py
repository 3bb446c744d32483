"""What is seen of gRPC calls that never become a request of a model: a line, a span, a count."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.api.grpc_around import around
from frontend.api.grpc_text import TextServicer
from tests.otlp import collecting, values_of
from tests.service.frontends import Stack, stack
from tests.service.test_frontend_gate import written
from tests.service.test_frontend_oip import request
from tests.waiting import PATIENCE_S, until
from tidemill.oip import open_inference_pb2 as oip
from tidemill.runtime import rpc
from tidemill.runtime.errors import ServiceError
from tidemill.security.keys import new_key
from tidemill.v1 import text_pb2 as pb

LINES = "tidemill.frontend.grpc"
SERVICE = TextServicer.contract.full_name
TRACE, ABOVE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = (("traceparent", f"00-{TRACE}-{ABOVE}-01"),)


class Caller:
    """Asks methods of TextService by name, and takes down what came back."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __call__(
        self, method: str, request: Any, metadata: Any = (), within_s: float = PATIENCE_S
    ) -> tuple[str, dict[str, Any]]:
        """(status, trailers)."""
        message = request if isinstance(request, bytes) else request.SerializeToString()
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")(
            message, metadata=metadata, timeout=within_s
        )
        code = await call.code()
        return code.name, dict(await call.trailing_metadata())


@asynccontextmanager
async def asked(folder: Path, **flags: Any) -> AsyncIterator[tuple[Stack, Caller]]:
    async with (
        stack(folder, **flags) as served,
        grpc.aio.insecure_channel(served.grpc_address) as channel,
    ):
        yield served, Caller(channel)


def asking(max_tokens: int, **options: Any) -> pb.TextServiceGenerateRequest:
    options["sampling"] = {"max_tokens": max_tokens}
    return pb.TextServiceGenerateRequest(prompt={"text": "ab"}, options=pb.TextOptions(**options))


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(one) for one in caplog.records if one.name == LINES]


async def test_every_call_but_probes_has_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Walks have their own; refused ones have one whatever refused them."""
    caplog.set_level(logging.INFO)
    made = new_key("alice")
    key = (("authorization", f"Bearer {made.key}"),)
    text, wrong = asking(3), asking(3, model="other")
    flags = {"api_keys_file": written(tmp_path, made), "key_requests_per_minute": 6}
    async with asked(tmp_path, **flags) as (served, ask):
        mine = (("x-request-id", "mine"),)
        status, trailers = await ask("Generate", text, mine)
        assert (status, trailers["x-request-id"]) == ("UNAUTHENTICATED", "mine")
        calls = [
            ("Generate", text, key),
            ("Generate", wrong, key),
            ("Generate", b"\xff", key),
            ("Generate", text, (*key, ("x-request-id", "i" * 129))),
            ("Tokenize", pb.TokenizeRequest(text="ab"), key),
            ("ListModels", pb.ListModelsRequest(), key),
            ("Detokenize", pb.DetokenizeRequest(token_ids=[10**6]), key),
            ("Generate", text, key),
        ]
        ends = [await ask(*call) for call in calls]
        async with grpc.aio.insecure_channel(served.grpc_address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            await live(b"", timeout=PATIENCE_S)
    lines = told(caplog)
    assert [line["message"].removeprefix(f"{SERVICE}/") for line in lines] == [
        "Generate UNAUTHENTICATED",
        "Generate NOT_FOUND",
        "Generate INVALID_ARGUMENT",
        "Generate INVALID_ARGUMENT",
        "Tokenize OK",
        "ListModels OK",
        "Detokenize INVALID_ARGUMENT",
        "Generate RESOURCE_EXHAUSTED",
    ]
    assert [line.get("key") for line in lines] == [
        None, "alice", "alice", None, "alice", "alice", "alice", None,
    ]  # fmt: skip
    ids = [trailers["x-request-id"] for _, trailers in ends[1:]]
    assert [line["request_id"] for line in lines] == ["mine", *ids], "the client can name it"
    assert len({*ids}) == len(ids), "a bad id is replaced"
    assert all(line["client"] == "127.0.0.1" and 0 <= line["seconds"] < 60 for line in lines)
    assert ends[0][1]["x-request-id"]
    assert ends[0][1]["x-usage-prompt-tokens"] == "2"
    walks = [one for one in caplog.records if one.name == "tidemill.frontend.request"]
    assert [one.getMessage() for one in walks] == ["request finished"]


async def test_what_is_refused_has_a_span_and_a_count(tmp_path: Path) -> None:
    with collecting() as (collector, endpoint):
        async with asked(tmp_path, api_key="k" * 40, otlp_endpoint=endpoint) as (served, ask):
            assert (await ask("Chat", pb.ChatRequest(), SAMPLED))[0] == "UNAUTHENTICATED"
            async with served.http() as client:
                headers = {"authorization": f"Bearer {'k' * 40}"}
                page = (await client.get("/metrics", headers=headers)).text
    (span,) = collector.of_trace(TRACE)
    assert (span.name, span.kind, span.parent_span_id.hex()) == (f"{SERVICE}/Chat", 2, ABOVE)
    assert span.status.code == 2
    found = values_of(span)
    assert found["rpc.response.status_code"] == found["error.type"] == "UNAUTHENTICATED"
    assert (
        'rpc_server_call_duration_seconds_count{rpc_method="tidemill.v1.TextService/Chat",'
        'rpc_response_status_code="UNAUTHENTICATED"} 1.0'
    ) in page


@pytest.mark.parametrize("held_s", [0.0, 0.05], ids=["status in time", "status too late to send"])
async def test_a_call_whose_time_is_up_says_so(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    held_s: float,
) -> None:
    """gRPC cancels it like one whose client has left; that is told apart by the clock. Where the
    loop is busy meanwhile, the call is over before the frontend sends the status."""
    caplog.set_level(logging.INFO)
    abort = rpc.abort

    async def held(context: Any, error: ServiceError) -> None:
        time.sleep(held_s)  # noqa: ASYNC251 - the loop shall stand still
        await abort(context, error)

    monkeypatch.setattr(rpc, "abort", held)
    with collecting() as (collector, endpoint):
        async with asked(tmp_path, otlp_endpoint=endpoint) as (served, ask):
            served.engine.step_s = 0.01
            assert (await ask("Generate", asking(400), SAMPLED, 1.0))[0] == "DEADLINE_EXCEEDED"
            await until(lambda: told(caplog))
    assert [line["status"] for line in told(caplog)] == ["DEADLINE_EXCEEDED"]
    spans = {span.name: values_of(span) for span in collector.of_trace(TRACE)}
    assert spans[f"{SERVICE}/Generate"]["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert spans["text_completion fake"]["error.type"] == "deadline_exceeded"


async def test_each_request_of_a_stream_is_asked_for_its_allowance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One stream is not a way around the limits: what is refused says so and ends nothing."""
    caplog.set_level(logging.INFO)
    method = next(
        one
        for one in oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
        if one.name == "ModelStreamInfer"
    )
    wanted = request(b"ab", max_tokens=2)
    flags = {"api_key": "k" * 40, "key_requests_per_minute": 2}
    async with asked(tmp_path, **flags) as (served, _):
        async with grpc.aio.insecure_channel(served.grpc_address) as channel:
            stream = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=oip.ModelInferRequest.SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            call = stream(iter([wanted] * 4), metadata=(("x-api-key", "k" * 40),))
            errors = [one.error_message async for one in call if one.error_message]
        assert len(served.engine.submits) == 2
    assert len(errors) == 2
    assert all("rate limit reached" in text for text in errors)
    lines = told(caplog)
    assert [line["status"] for line in lines] == ["RESOURCE_EXHAUSTED"] * 2
    assert {line["key"] for line in lines} == {"default"}


async def test_what_strangers_send_is_not_parsed() -> None:
    parsed: list[bytes] = []

    async def answer(request: Any, context: Any) -> bytes:
        return bytes(request)

    @asynccontextmanager
    async def only_friends(context: Any) -> AsyncIterator[None]:
        if not dict(context.invocation_metadata()).get("friend"):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who?")
        yield

    class Interceptor(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            return around(await continuation(details), only_friends, parses_inside=True)

    def parse(content: bytes) -> bytes:
        parsed.append(content)
        return content * 2

    server = grpc.aio.server(interceptors=(Interceptor(),))
    handler = grpc.unary_unary_rpc_method_handler(answer, request_deserializer=parse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", {"C": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/a.B/C")
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(ask(b"x"), PATIENCE_S)
        assert parsed == []
        assert await asyncio.wait_for(ask(b"x", metadata=(("friend", "1"),)), PATIENCE_S) == b"xx"
    await server.stop(None)
    assert parsed == [b"x"]
