"""How a decode engine speaks to prefill engines, and what it says of those that it cannot reach."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio import Metadata

from engine_service.server import kv_sources, transfer_in
from tests.certificates import Authority
from tests.service import test_transfer_in
from tests.service.test_transfer_in import INLINE, PAGE, Source, target
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.errors import FailedPrecondition
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

NAME = "prefill.example"
SECOND = pb.KvPiece(start=PAGE, num_tokens=PAGE, crc32=INLINE.crc32, inline=INLINE.inline)
LOST = grpc.aio.AioRpcError(
    grpc.StatusCode.INTERNAL, Metadata(), Metadata(), "Internal error from Core"
)


@pytest.mark.parametrize("asked", [NAME, "another.example", None])
async def test_a_certificate_bears_the_name_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: str | None
) -> None:
    """Addresses are IPs, and certificates bear none: without a name nobody could be trusted."""
    authority = Authority(tmp_path, "ca")
    flags = {"kv_tls_ca": authority.path, "kv_tls_name": asked}
    async with target("grpc", authority.sign("prefill", NAME), **flags) as made:
        await made.fetch()
        assert len(made.asks.imports) == (asked == NAME)
        text = (
            f"the certificate of the prefill engine at {made.addresses[0]} does not bear the name "
            f"that is expected, {repr(asked) if asked else 'the host of its address'}; give "
            "--kv-tls-name a name that it bears"
        )
        assert (text in caplog.text) is (asked != NAME), caplog.text


def told(caplog: pytest.LogCaptureFixture, address: str) -> bool:
    """Whether address, reason and fix were told, and no more than that."""
    levels = {one.levelno for one in caplog.records if one.name == "tidemill.engine"}
    words = rf"no connection to the prefill engine at {address}: \S.*; check that .*--kv-tls-ca"
    assert "Internal error" not in caplog.text, caplog.text
    return levels == {logging.WARNING} and re.search(words, caplog.text) is not None


async def test_a_closed_port_is_told_with_address_reason_and_fix(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_in, "_REASON_S", PATIENCE_S)  # it is heard long before
    async with target("grpc") as made:
        with socket.socket() as closed:  # bound, so that nobody else listens there
            closed.bind(("127.0.0.1", 0))
            made.addresses.append(f"127.0.0.1:{closed.getsockname()[1]}")
            await made.fetch(2)
            assert told(caplog, made.addresses[2]), caplog.text
            assert "Connection refused" in caplog.text


async def test_a_killed_engine_is_told_with_address_reason_and_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the middle of a transfer: its end may be heard of before more is sent, or by sending."""
    async with target("grpc") as made:
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.service.stuck_source", stdout=asyncio.subprocess.PIPE
        )
        try:
            assert engine.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                port = int(await engine.stdout.readline())
            made.addresses.append(f"127.0.0.1:{port}")
            made.asks.importing.clear()
            fetch = asyncio.create_task(made.fetch(2))
            await until(lambda: made.asks.imports)
            os.kill(engine.pid, signal.SIGKILL)
            await engine.wait()
            made.asks.importing.set()
            await fetch
        finally:
            with suppress(ProcessLookupError):
                engine.kill()
            await engine.wait()
        assert told(caplog, made.addresses[2]), caplog.text


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_reason_that_was_lost_is_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """gRPC loses it where a message is sent before the end of the call has come."""
    if is_gone:  # and heard long before; from an engine that is there nothing is
        monkeypatch.setattr(transfer_in, "_REASON_S", PATIENCE_S)
    async with target("grpc") as made:

        async def receive(*_: Any) -> bool:
            if is_gone:
                await made.servers[0].stop(None)
            raise LOST

        monkeypatch.setattr(made.fetches, "_receive", receive)
        await made.fetch()
        assert told(caplog, made.addresses[0]), caplog.text
        # The end of the old connection, or the refusal of a new one: whichever is heard first.
        assert ("it broke while a message was sent" in caplog.text) is not is_gone


async def test_who_cannot_ask_for_the_reason_tells_the_failure_that_there_was(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with target("grpc") as made:

        def refuse(*_: Any) -> None:
            raise FailedPrecondition("the certificates are gone")

        async def receive(*_: Any) -> bool:
            monkeypatch.setattr(made.fetches._sources, "call", refuse)
            raise LOST

        monkeypatch.setattr(made.fetches, "_receive", receive)
        await made.fetch()
        assert told(caplog, made.addresses[0]), caplog.text
        assert "it broke while a message was sent" in caplog.text


def renew(certificates: Path) -> None:
    certificates.write_bytes(certificates.read_bytes() + b"\n")


class InTwo(Source):
    """Sends a second piece when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()

    async def Transfer(self, requests: Any, context: Any) -> None:
        await context.read()
        for piece in (INLINE, SECOND):
            await context.write(pb.TransferResponse(piece=piece))
            await context.read()  # that it was taken
            await self.goes_on.wait()


@pytest.mark.parametrize("is_renewed", [True, False])
async def test_a_transfer_ends_on_the_connection_that_it_began_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_renewed: bool
) -> None:
    """New certificates, and connections to too many engines, end a connection behind its calls."""
    monkeypatch.setattr(test_transfer_in, "Source", InTwo)
    monkeypatch.setattr(kv_sources, "_MAX_SOURCES", 1)
    authority = Authority(tmp_path, "ca")
    flags = {"kv_tls_ca": authority.path, "kv_tls_name": NAME}
    async with target("grpc", authority.sign("prefill", NAME), **flags) as made:
        sources, first = made.fetches._sources, asyncio.create_task(made.fetch())
        await until(lambda: made.asks.imports)
        (line,) = sources._lines.values()
        if is_renewed:
            renew(Path(authority.path))
        address = made.addresses[0 if is_renewed else 1]
        # Two calls at once find one new connection.
        calls = [
            sources.call(address, lambda channel: rpc.KvTransferServiceStub(channel).Transfer())
            for _ in range(2)
        ]
        (other,) = sources._lines.values()
        assert other is not line
        assert (other.num_calls, line.num_calls, sources._left) == (2, 1, {line})
        for source in made.sources:
            source.goes_on.set()
        await first
        assert len(made.asks.imports) == 2
        await until(lambda: not sources._left and not sources._closing)
        with pytest.raises(grpc.aio.UsageError, match="closed"):
            rpc.KvTransferServiceStub(line.channel).Transfer()
        for call in calls:
            call.cancel()
        await until(lambda: not other.num_calls)
