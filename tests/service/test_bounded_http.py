"""Clients that send too much, too slowly, or not to the end, over bare sockets to a frontend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.api.bounded_http import MAX_HEAD_BYTES
from tests.service.frontends import stack
from tests.waiting import PATIENCE_S, until

PIECE = b"a" * 4096
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
ROOM = 4 << 20
"""What sockets of both ends may hold, and more."""


async def answer_to(port: int, pieces: Iterator[bytes]) -> tuple[int, bytes]:
    """Sends until the other side has enough: (bytes it took, what it said)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
                await asyncio.sleep(0)  # a transport that takes everything does not yield
            return sent, await reader.read()
    except ConnectionError:
        return sent, b"".join([part async for part in rest(reader)])
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> Iterator[bytes]:  # type: ignore[misc]
    try:
        while part := await reader.read(4096):
            yield part
    except ConnectionError:
        return


def endless(head: bytes, piece: bytes, num_bytes: int = 16 * ROOM) -> Iterator[bytes]:
    yield head
    for _ in range(num_bytes // len(piece)):
        yield piece


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nx: ", PIECE),  # one header without an end
        (b"GET /health HTTP/1.1\r\n", b"x: " + b"a" * 1000 + b"\r\n"),  # headers without an end
        (b"GET /", PIECE),
        (CHUNKED + b"0\r\nx: ", PIECE),  # behind the body
        (CHUNKED + b"1;x=", PIECE),  # between two pieces of it
    ],
)
async def test_nobody_is_made_to_keep_a_head_without_an_end(
    tmp_path: Path, head: bytes, piece: bytes
) -> None:
    async with stack(tmp_path, api_key="k" * 40) as served:
        sent, said = await answer_to(served.frontend.http_port, endless(head, piece))
        assert sent < ROOM + MAX_HEAD_BYTES
        if not head.startswith(b"POST"):
            assert said == b"" or said.startswith(b"HTTP/1.1 431 ")
        fits = b"GET /health/live HTTP/1.1\r\nconnection: close\r\nx: " + PIECE * 15 + b"\r\n\r\n"
        _, said = await answer_to(served.frontend.http_port, iter([fits[:9], fits[9:]]))
        assert said.startswith(b"HTTP/1.1 200 ")


async def test_a_request_has_its_time_to_come_and_an_answer_all_it_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stack(tmp_path, read_timeout_s=1.0) as served:
        port, began = served.frontend.http_port, time.monotonic()
        length = POST + b"content-length: 40\r\n\r\n{"
        slow = [answer_to(port, iter([part])) for part in (b"GET /he", length)]
        assert [said for _, said in await asyncio.gather(*slow)] == [b"", b""]
        assert 0.9 < time.monotonic() - began < PATIENCE_S / 2
        assert caplog.text.count("took too long to come") == 2
        served.engine.step_s = 0.02
        async with served.http() as client:
            body = {"prompt": "ab", "max_tokens": 80, "stream": True}
            text = (await client.post("/v1/completions", json=body)).text
        assert text.endswith("data: [DONE]\n\n"), "1.6 s of answer"
        lines = [vars(one) for one in caplog.records if one.name == "tidemill.frontend.http"]
        assert "POST /v1/completions 499" in [line["message"] for line in lines]
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_an_idle_connection_is_kept_for_longer_than_clients_keep_it(tmp_path: Path) -> None:
    """httpx takes one that has been idle for up to 5 s: were it closed here then, the request that
    is on its way would be lost."""
    async with stack(tmp_path) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.frontend.http_port)
        for idle_s in (5.5, 0.0):
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"}")
            await asyncio.sleep(idle_s)
        writer.close()


async def test_a_client_that_leaves_inside_of_its_request_is_no_failure_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stack(tmp_path) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.frontend.http_port)
        writer.write(POST + b"content-length: 40\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await until(lambda: "POST /v1/completions 499" in caplog.text)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_ends_the_first_of_several_requests_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, streams: bool
) -> None:
    caplog.set_level(logging.INFO)
    body = b'{"prompt": "ab", "max_tokens": 100, "stream": %b}' % str(streams).lower().encode()
    asked = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    async with stack(tmp_path) as served:
        served.engine.step_s = 0.02
        _, writer = await asyncio.open_connection("127.0.0.1", served.frontend.http_port)
        writer.write(asked * 3)
        await until(lambda: served.engine.live)
        writer.close()
        await until(lambda: served.engine.outcomes)
        assert served.engine.outcomes == ["aborted"]
        assert len(served.engine.submits) == 1, "nobody is there for the others"
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("cut", [None, 30, 200], ids=str)
async def test_a_request_that_offers_another_protocol_keeps_its_body(
    tmp_path: Path, cut: int | None
) -> None:
    """As Java's HttpClient does with every request to a server whose protocols it does not know."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    body = b'{"prompt": "ab", "max_tokens": 2}'
    length = POST + offer + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    chunk = POST + offer + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    last = b"GET /health/live HTTP/1.1\r\n" + offer.replace(b"Upgrade, ", b"Upgrade, close, ")
    asked = length + chunk % (len(body), body) + length + last + b"\r\n"
    async with stack(tmp_path) as served:
        pieces = [asked] if cut is None else [asked[:cut], asked[cut:]]
        _, said = await answer_to(served.frontend.http_port, iter(pieces))
    assert said.count(b"HTTP/1.1 200 OK") == said.count(b"HTTP/1.1") == 4
    assert said.count(b'"completion_tokens":2') == 3


@pytest.mark.parametrize("coding", ["gzip", "br, zstd", "Identity"])
async def test_a_body_that_is_packed_is_refused_by_that_name(tmp_path: Path, coding: str) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        for path in ("/v1/completions", "/v1/messages"):
            answer = await client.post(path, content=b"{", headers={"content-encoding": coding})
            is_packed = coding != "Identity"
            assert answer.status_code == (415 if is_packed else 400)
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert (coding in answer.json()["error"]["message"]) == is_packed


async def test_a_client_of_http_1_0_gets_no_chunks(tmp_path: Path) -> None:
    """It does not know them (RFC 9112, 6.1): between the events it would read lengths."""
    body = b'{"prompt": "ab", "max_tokens": 3, "stream": %b}'
    head = b"POST /v1/completions HTTP/%b\r\ncontent-length: %d\r\nconnection: keep-alive\r\n\r\n"
    async with stack(tmp_path) as served:
        port = served.frontend.http_port
        for streams in (b"true", b"false"):
            asked = body % streams
            _, said = await answer_to(port, iter([head % (b"1.0", len(asked)) + asked]))
            facts, _, text = said.partition(b"\r\n\r\n")
            assert facts.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in facts
            assert b"transfer-encoding" not in facts
            if streams == b"true":
                assert text.startswith(b"data: {")
                assert text.endswith(b"}\n\ndata: [DONE]\n\n")
            else:
                assert b"content-length: %d\r\n" % len(text) in facts
