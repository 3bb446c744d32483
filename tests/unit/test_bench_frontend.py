"""The parts of `bench frontend`: a vocabulary of times, and connections at the level of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

import tidemill
from frontend.tokenizer import TextTokenizer
from tests.waiting import PATIENCE_S
from tidemill.bench.clock import NUM_TICKS, since_ms, stamps, tick, write_clock
from tidemill.bench.wire import GrpcConnection, HttpConnection

DEMO = Path(tidemill.__file__).parent / "builtin" / "demo"
BODY = b'{"content":" ~00007 ~59999"}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nx: y\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1c\r\n" + BODY + b"\r\n0\r\n\r\n"


def test_every_tick_is_a_token_and_no_prompt_has_one(tmp_path: Path) -> None:
    first = write_clock(DEMO, tmp_path)
    made, plain = TextTokenizer(tmp_path), TextTokenizer(DEMO)
    for number in (0, 7, NUM_TICKS - 1):
        assert made.decode([first + number], skip_special_tokens=True) == f" ~{number:05d}"
    text = "add: 1+2 ~00007 <|eos|>"
    assert made.encode(text, add_special_tokens=True) == plain.encode(text, add_special_tokens=True)


def test_times_are_read_across_the_end_of_the_clock() -> None:
    assert since_ms(tick(5.9990), 5.9990) == pytest.approx(0, abs=0.1)
    assert since_ms(tick(5.9990), 6.0010) == pytest.approx(2, abs=0.1)
    assert since_ms(tick(6.0010), 5.9990) == pytest.approx(-2, abs=0.1)


def test_a_stamp_that_the_network_cut_in_two_is_one() -> None:
    for cut in range(len(BODY) + 1):
        found = stamps([(1.0, BODY[:cut]), (2.0, BODY[cut:])])
        assert [stamp for _, stamp in found] == [7, 59999], cut
    assert stamps([(1.0, b"x-request-id: 123456 2026 ~1234")]) == []


class Sink:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, content: bytes) -> None:
        self.written += content


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED])
async def test_an_http_answer_ends_where_it_ends_however_it_is_cut(answer: bytes) -> None:
    for cut in range(1, len(answer)):
        connection, sink = HttpConnection(), Sink()
        connection.connection_made(cast("Any", sink))
        asking = asyncio.create_task(connection.ask(b"a request"))
        await asyncio.sleep(0)
        connection.data_received(answer[:cut])
        await asyncio.sleep(0)
        assert not asking.done(), cut
        connection.data_received(answer[cut:])
        arrivals = await asking
        assert b"".join(chunk for _, chunk in arrivals) == answer
        assert [stamp for _, stamp in stamps(arrivals)] == [7, 59999]


async def test_a_connection_that_breaks_fails_the_request() -> None:
    for connection in (HttpConnection(), GrpcConnection("/a/b")):
        connection.connection_made(cast("Any", Sink()))
        asking = asyncio.create_task(connection.ask(b""))
        await asyncio.sleep(0)
        connection.connection_lost(None)
        with pytest.raises(ConnectionError):
            await asking


def length_of(request: bytes) -> int:
    """How often an answer repeats the number that was asked with."""
    return 1 + int(request) * 997


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[GrpcConnection, asyncio.BaseTransport]]:
    """A connection to a real server that answers twice, at `length_of`, and refuses what is
    empty."""

    async def echo(request: bytes, context: Any) -> AsyncIterator[bytes]:
        if not request:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "empty")
        yield request * length_of(request)
        yield request * length_of(request)

    handler = grpc.unary_stream_rpc_method_handler(echo)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    loop = asyncio.get_running_loop()
    transport, made = await loop.create_connection(
        lambda: GrpcConnection("/s/m"), "127.0.0.1", port
    )
    try:
        yield made, transport
    finally:
        transport.close()
        await server.stop(0)


async def test_calls_over_http2_reach_a_real_server() -> None:
    """Many at once on one connection, also answers larger than any window by default."""
    contents = [b"%d" % number for number in range(1, 40)]
    async with echoing() as (connection, _), asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*(connection.ask(one) for one in contents))
        for content, arrivals in zip(contents, answers, strict=True):
            answer = content * length_of(content)
            message = b"\0" + len(answer).to_bytes(4, "big") + answer
            assert b"".join(chunk for _, chunk in arrivals) == 2 * message
        assert await connection.ask(b"") == [], "a refusal brings nothing"
