"""The Python clients against a real gRPC server that refuses first: what is sent again, when, and
what never is; and in whose trace calls travel."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from tidemill.client import AsyncClient, Client
from tidemill.exchange import CallOptions
from tidemill.runtime.errors import (
    EngineDead,
    InvalidRequest,
    Overloaded,
    ServiceError,
    Unavailable,
    from_grpc_code,
)
from tidemill.runtime.rpc import to_status
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

BUSY = Overloaded("the queue is full", retry_after_ms=50)
GONE = Unavailable("the engine is lost")
DEAD = EngineDead("the engine was lost", retry_after_ms=50)
WRONG = InvalidRequest("temperature is -1")


class Refusing(rpc.TextServiceServicer):
    """Fails with the errors it is given, in their order, and then answers."""

    def __init__(self) -> None:
        self.failures: list[ServiceError] = []
        self.fails_behind_a_message = False
        self.seen: list[dict[str, str]] = []
        self.deadlines: list[float | None] = []

    def _meet(self, context: grpc.ServicerContext) -> None:
        self.seen.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())
        if self.failures:
            status = to_status(self.failures.pop(0))
            packed = (("grpc-status-details-bin", status.SerializeToString()),)
            context.set_trailing_metadata(packed)
            code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
            context.abort(code, status.message)

    def Generate(self, request: Any, context: Any) -> Any:
        self._meet(context)
        return pb.TextServiceGenerateResponse(choices=[{"text": "done"}])

    def ListModels(self, request: Any, context: Any) -> Any:
        self._meet(context)
        return pb.ListModelsResponse()

    def GenerateStream(self, request: Any, context: Any) -> Iterator[Any]:
        if self.fails_behind_a_message:
            yield pb.GenerateStreamResponse(choice={"text": "half"})
        self._meet(context)
        yield pb.GenerateStreamResponse(choice={"text": "done"})


@contextmanager
def serving(service: Refusing) -> Iterator[str]:
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        rpc.add_TextServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.fixture
def service() -> Refusing:
    return Refusing()


@pytest.fixture
def address(service: Refusing) -> Iterator[str]:
    with serving(service) as found:
        yield found


def generate(client: Client, options: CallOptions | None) -> str:
    return client.generate("a", options=options).text


def stream(client: Client, options: CallOptions | None) -> str:
    return "".join(delta.text for delta in client.generate_stream("a", options=options))


def blocking(ask: Callable[[Client, CallOptions | None], str]) -> Callable[..., str]:
    def run(address: str, options: CallOptions | None = None, **config: Any) -> str:
        with Client(address, **config) as client:
            return ask(client, options)

    return run


def with_asyncio(streams: bool) -> Callable[..., str]:
    def run(address: str, options: CallOptions | None = None, **config: Any) -> str:
        async def ask() -> str:
            async with AsyncClient(address, **config) as client:
                if not streams:
                    return (await client.generate("a", options=options)).text
                deltas = client.generate_stream("a", options=options)
                return "".join([delta.text async for delta in deltas])

        return asyncio.run(ask())

    return run


ASKS = {
    "generate": blocking(generate),
    "stream": blocking(stream),
    "async generate": with_asyncio(False),
    "async stream": with_asyncio(True),
}
every = pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
Ask = Callable[..., str]


@every
def test_a_refusal_that_names_a_time_is_asked_again_then(
    ask: Ask, service: Refusing, address: str
) -> None:
    service.failures = [BUSY, BUSY]
    began = time.monotonic()
    assert ask(address) == "done"
    assert time.monotonic() - began >= 0.1
    assert len(service.seen) == 3


@every
def test_no_more_often_than_allowed(ask: Ask, service: Refusing, address: str) -> None:
    for max_retries in (0, 2):
        service.failures, service.seen = [BUSY] * 4, []
        with pytest.raises(Overloaded, match="queue is full"):
            ask(address, max_retries=max_retries)
        assert len(service.seen) == max_retries + 1


@every
@pytest.mark.parametrize("failure", [GONE, DEAD, WRONG], ids=lambda error: type(error).__name__)
def test_what_may_have_run_is_not_sent_again(
    failure: ServiceError, ask: Ask, service: Refusing, address: str
) -> None:
    service.failures = [failure]
    with pytest.raises(from_grpc_code(failure.grpc_code)):
        ask(address)
    assert len(service.seen) == 1


@every
def test_the_deadline_holds_for_all_attempts(ask: Ask, service: Refusing, address: str) -> None:
    # What travels is rounded up, by up to a second.
    service.failures = [Overloaded("full", retry_after_ms=1200)]
    assert ask(address, CallOptions(timeout_s=20.0)) == "done"
    first, second = service.deadlines
    assert first is not None
    assert second is not None
    assert second <= first - 0.1
    service.failures, service.seen = [Overloaded("full", retry_after_ms=60_000)], []
    with pytest.raises(Overloaded):
        ask(address, CallOptions(timeout_s=20.0))
    assert len(service.seen) == 1


@every
@pytest.mark.parametrize("timeout_s", [math.inf, 1e30, 1e10])
def test_a_deadline_behind_all_clocks_is_none(
    ask: Ask, timeout_s: float, service: Refusing, address: str
) -> None:
    assert ask(address, CallOptions(timeout_s=timeout_s)) == "done"


@every
def test_a_deadline_that_is_no_number_is_refused(ask: Ask, service: Refusing, address: str) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s is nan"):
        ask(address, CallOptions(timeout_s=math.nan))


@pytest.mark.parametrize("name", ["stream", "async stream"])
def test_a_stream_that_has_begun_is_not_sent_again(
    name: str, service: Refusing, address: str
) -> None:
    service.fails_behind_a_message, service.failures = True, [BUSY]
    with pytest.raises(Overloaded):
        ASKS[name](address)
    assert len(service.seen) == 1


def test_look_ups_are_asked_again_without_the_servers_word(service: Refusing, address: str) -> None:
    service.failures = [GONE]
    with Client(address) as client:
        assert client.list_models() == []
    assert len(service.seen) == 2


@every
def test_calls_travel_in_the_callers_trace(ask: Ask, service: Refusing, address: str) -> None:
    ask(address)
    assert "traceparent" not in service.seen[-1]
    with trace.use_span(TracerProvider().get_tracer("test").start_span("outer")) as span:
        ask(address)
        ask(address, CallOptions(traceparent=f"00-{1:032x}-{2:016x}-01", fairness_key="anna"))
    context = span.get_span_context()
    assert context.trace_id
    found = service.seen[-2]["traceparent"]
    assert found.startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
    assert service.seen[-1]["traceparent"] == f"00-{1:032x}-{2:016x}-01"
    assert service.seen[-1]["x-fairness-key"] == "anna"
