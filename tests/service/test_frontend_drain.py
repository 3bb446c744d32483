"""A frontend that is told to stop loses nobody who has connected, however far that got."""

from __future__ import annotations

import asyncio
import errno
import json
import select
import socket
import ssl
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.listener import drop_handshakes
from tests.certificates import Authority
from tests.service.frontends import stack
from tests.waiting import PATIENCE_S, until

BODY = json.dumps({"prompt": "ab", "max_tokens": 4})
ASK = (
    "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    f"content-length: {len(BODY)}\r\n\r\n{BODY}"
).encode()


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Asks on an open connection, and returns all that comes until it is closed."""
    writer.write(ASK)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.close()


async def until_refused(port: int) -> None:
    """Until nobody can connect any more; whoever can asks nothing, and leaves."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.01)


def check(answer: bytes) -> None:
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    assert b"connection: close" in answer.lower()
    assert answer.endswith(b"}")


async def test_who_waits_to_be_accepted_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 connections that nobody has accepted when the drain begins; they ask when all others are
    refused already."""
    monkeypatch.setattr("frontend.listener._MOMENT_S", PATIENCE_S)
    async with stack(tmp_path) as served:
        port = served.frontend.http_port
        # This blocks the loop, which therefore accepts none of them.
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        drained = asyncio.create_task(served.frontend.drain())
        await until_refused(port)
        assert not drained.done()
        for one in waiting:
            check(await answered(*await asyncio.open_connection(sock=one)))
        await asyncio.wait_for(drained, PATIENCE_S)


async def test_a_kept_connection_may_ask_once_more(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        before = await client.post("/v1/completions", content=BODY)
        assert "connection" not in before.headers
        drained = asyncio.create_task(served.frontend.drain())
        await until(lambda: served.frontend.desk.is_draining)
        last = await client.post("/v1/completions", content=BODY)
        assert (last.status_code, last.headers["connection"]) == (200, "close")
        await asyncio.wait_for(drained, PATIENCE_S)
        with pytest.raises(httpx.ConnectError):
            await client.post("/v1/completions", content=BODY)


async def test_half_a_request_is_served_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.listener._MOMENT_S", PATIENCE_S)
    async with stack(tmp_path) as served:
        desk, port = served.frontend.desk, served.frontend.http_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK[:-10])
        await writer.drain()
        drained = asyncio.create_task(served.frontend.drain())
        await until(lambda: desk._is_closed)
        assert not drained.done()
        writer.write(ASK[-10:])
        check(await asyncio.wait_for(reader.read(), PATIENCE_S))
        writer.close()
        await asyncio.wait_for(drained, PATIENCE_S)


async def test_who_never_asks_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.listener._MOMENT_S", 0.1)
    async with stack(tmp_path) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.frontend.http_port)
        await asyncio.wait_for(served.frontend.drain(), PATIENCE_S)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_storm_is_served_or_refused(
    tmp_path: Path, is_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that connect all the time, each until it is refused: every connection is answered."""
    flags: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if is_tls:
        authority = Authority(tmp_path / "pki", "ca")
        pair = authority.sign("server")
        flags = {"tls_cert": pair.cert, "tls_key": pair.key}
        context: ssl.SSLContext = authority.context()
        options = {"ssl": context, "server_hostname": "127.0.0.1"}
    else:  # with TLS there may always be somebody, and all of it is waited for
        monkeypatch.setattr("frontend.listener._MOMENT_S", PATIENCE_S)
    counts: Counter[str] = Counter()
    async with stack(tmp_path, **flags) as served:
        port = served.frontend.http_port

        async def client() -> None:
            while True:
                try:
                    opened = await asyncio.open_connection("127.0.0.1", port, **options)
                except ConnectionRefusedError:
                    counts["refused"] += 1
                    return
                check(await answered(*opened))
                counts["answered"] += 1

        clients = [asyncio.create_task(client()) for _ in range(16)]
        await until(lambda: counts["answered"] > 50)
        await asyncio.wait_for(served.frontend.drain(), PATIENCE_S)
        await asyncio.wait_for(asyncio.gather(*clients), PATIENCE_S)
    assert counts["refused"] == 16


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_handshake_is_answered_while_connections_go_on(host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        listener.listen()
        address = listener.getsockname()[:2]
        with socket.create_connection(address) as before, socket.socket(listener.family) as after:
            drop_handshakes(listener)
            after.setblocking(False)
            after.connect_ex(address)
            assert not select.select([], [after], [], 0.2)[1], "it is answered"
            accepted, _ = listener.accept()
            with accepted:
                before.sendall(b"ab")
                assert accepted.recv(2) == b"ab"
                listener.close()
                assert select.select([], [after], [], PATIENCE_S)[1]
                refused = after.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                assert refused == errno.ECONNREFUSED
                accepted.sendall(b"cd")
                assert before.recv(2) == b"cd"
