"""Errors to statuses and back, options, ports."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from tidemill.runtime import errors, rpc
from tidemill.runtime.rpc import answering, bind, server_options, to_error, to_status

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ServiceError)
]


class Context:
    """Takes down what a handler is aborted with."""

    def trailing_metadata(self) -> tuple:
        return (("x-request-id", "mine"),)

    async def abort(self, code: grpc.StatusCode, text: str, trailing_metadata: tuple) -> None:
        metadata = grpc.aio.Metadata(*trailing_metadata)
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, text)


async def travelled(error: Exception) -> errors.ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with answering(Context()):
            raise error
    return to_error(caught.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_error_survives_the_trip(kind: type[errors.ServiceError]) -> None:
    sent = kind("why", reason="SOME_REASON", param="a.b", retry_after_ms=1500, facts={"k": "v"})
    got = await travelled(sent)
    assert got.grpc_code == sent.grpc_code
    assert (got.message, got.reason, got.param) == ("why", "SOME_REASON", "a.b")
    assert (got.retry_after_ms, got.facts) == (1500, {"k": "v"})


async def test_bugs_are_internal_and_long_texts_are_cut() -> None:
    got = await travelled(KeyError("oops"))
    assert got.grpc_code == 13
    assert "KeyError" in got.message
    assert len((await travelled(errors.NotFound("x" * 9999))).message) == 1024


@pytest.mark.parametrize("text", ["x" * 20_000, "\N{DOLPHIN}" * 2100, "é" * 9000, "\ud800" * 9000])
async def test_long_words_of_any_script_arrive_through_a_real_call(text: str) -> None:
    """A status that is too large for HTTP/2 headers would reach the client as another error."""
    facts = {f"fact {i} {text}": text for i in range(20)}
    refused = errors.InvalidRequest(text, param=text, retry_after_ms=5, facts={"k": "v", **facts})

    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            raise refused

    handler = grpc.unary_unary_rpc_method_handler(refuse)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/m")(b"")
    await server.stop(None)
    got = to_error(caught.value)
    assert isinstance(got, errors.InvalidRequest)
    sent = text.replace("\ud800", "?")
    assert sent.startswith(got.message)
    assert 1020 <= len(got.message.encode()) <= 1024
    assert got.param
    assert sent.startswith(got.param)
    assert len(got.param.encode()) <= 256
    assert got.facts["k"] == "v"
    assert all(len(value.encode()) <= 256 for value in got.facts.values())
    assert got.retry_after_ms == 5


def test_a_bad_field_is_named_in_bad_request() -> None:
    status = to_status(errors.InvalidRequest("top_p is 0", param="top_p"))
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    assert bad.field_violations[0].field == "top_p"


def test_a_status_without_details_is_an_error_too() -> None:
    empty = grpc.aio.Metadata()
    failure = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, "gone")
    error = to_error(failure)
    assert isinstance(error, errors.Unavailable)
    assert (error.message, error.reason) == ("gone", "UNAVAILABLE")


def test_option_names_are_those_grpc_knows() -> None:
    """The core ignores a misspelt key silently, so the names are spelt out here once more."""
    options = dict(server_options(1 << 20))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.max_receive_message_length"] == 1 << 20
    options = dict(rpc.channel_options(1, unanswered_ms=1200))
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.keepalive_timeout_ms"] == 1200


@contextmanager
def busy(port: int, seconds: float) -> Iterator[int]:
    """The port of a server that takes connections at once and lets them wait so long."""

    def forward(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        client, _ = listener.accept()
        time.sleep(seconds)
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=forward, args=(server, client))
            back.start()
            forward(client, server)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        yield listener.getsockname()[1]
        serving.join()


async def test_a_server_that_is_slow_to_shake_hands_is_no_absent_one() -> None:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    handler = grpc.unary_unary_rpc_method_handler(echo)
    server = grpc.aio.server(options=server_options(1 << 20))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with busy(port, 1.0) as slow:
        options = rpc.channel_options(1 << 20)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{slow}", options) as channel:
            assert await channel.unary_unary("/s/m")(b"hello") == b"hello"
    await server.stop(None)


async def test_a_taken_port_names_port_and_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = grpc.aio.server(options=server_options(1 << 20))
        with pytest.raises(errors.FailedPrecondition, match=rf"{port}.*--some-port") as caught:
            bind(server, "127.0.0.1", port, flag="--some-port")
        assert caught.value.reason == "PORT_IN_USE"
        await server.stop(None)


async def test_a_deadline_that_grpc_rounds_up_has_passed_when_the_client_says_so() -> None:
    """Of 12.345 s a server hears 12.4; the client cancels at 12.345."""
    heard: list[float] = []

    async def told(request: bytes, context: Any) -> bytes:
        heard.append(context.time_remaining())
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(told)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.unary_unary("/s/m")(b"")  # connecting may take longer than the least of them
        for asked_s in (0.3, 1.2301, 12.301, 123.01, 1230.1):
            await channel.unary_unary("/s/m")(b"", timeout=asked_s)
            assert rpc.is_late(0.0, asked_s, heard[-1]), asked_s
    await server.stop(None)
    assert heard[-1] > 1232, "control: it is rounded"
    assert not rpc.is_late(0.0, 1230.1 * 0.97, heard[-1])
    assert not rpc.is_late(0.0, 1e9, None)
