"""The two protocols of `bench serve` where a connection breaks: what broke is a failure, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from tests.waiting import PATIENCE_S, until
from tidemill.bench.traffic.answer import CONNECTION, OK, Answer
from tidemill.bench.traffic.asked import Asked
from tidemill.bench.traffic.grpc_face import GrpcFace
from tidemill.bench.traffic.http_face import HttpFace
from tidemill.bench.traffic.target import Target

ASKED = Asked("tide", None, 3)
BODY = b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
LATE_S = 1.2


def target(port: int, *, is_grpc: bool) -> Target:
    return Target(
        urls=(f"http://127.0.0.1:{port}",), is_grpc=is_grpc, is_chat=False, model="m",
        temperature=0.0, ignore_eos=True, timeout_s=PATIENCE_S,
    )  # fmt: skip


async def once(face: Any) -> Answer:
    """One request."""
    now = asyncio.get_running_loop().time()
    answer = Answer(now, begun=now)
    async with asyncio.timeout(PATIENCE_S):
        await face.ask(face.write(ASKED), answer)
    return answer


@asynccontextmanager
async def closing(after_s: float, heard: list[int]) -> AsyncIterator[int]:
    """A server that answers one request of a connection and, `after_s` behind the second one,
    closes it without a word. `heard` has the number of each request within its connection."""

    busy: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        busy.add(writer)
        with suppress(asyncio.IncompleteReadError):
            for number in (1, 2):
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                heard.append(number)
                if number == 1:
                    writer.write(ANSWER)
                    await writer.drain()
            await asyncio.sleep(after_s)
        writer.close()
        await writer.wait_closed()
        busy.discard(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await until(lambda: not busy)


@pytest.mark.parametrize(("after_s", "status"), [(0.0, OK), (LATE_S, CONNECTION)])
async def test_only_a_close_that_crossed_the_request_is_overlooked(
    after_s: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not after_s:  # however late this process sees the close
        monkeypatch.setattr("tidemill.bench.traffic.http_face._CROSSED_S", PATIENCE_S)
    heard: list[int] = []
    async with closing(after_s, heard) as port:
        face = HttpFace(target(port, is_grpc=False), f"http://127.0.0.1:{port}")
        assert (await once(face)).status == OK
        assert (await once(face)).status == status
        assert heard == ([1, 2, 1] if status == OK else [1, 2])
        await face.close()


async def test_a_server_that_goes_away_has_not_refused() -> None:
    """gRPC says UNAVAILABLE of both."""
    has_begun = asyncio.Event()

    async def generate(request: Any, context: Any) -> None:
        has_begun.set()
        await asyncio.sleep(PATIENCE_S)

    method = grpc.unary_stream_rpc_method_handler(generate)
    service = grpc.method_handlers_generic_handler(
        "tidemill.v1.TextService", {"GenerateStream": method}
    )
    server = grpc.aio.server(handlers=[service])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    face = GrpcFace(target(port, is_grpc=True), f"http://127.0.0.1:{port}")
    asking = asyncio.create_task(once(face))
    await until(has_begun.is_set)
    await server.stop(None)
    answer = await asking
    assert (answer.status, answer.is_refused) == (CONNECTION, False)
    await face.close()
