"""What a decode engine makes of what a prefill engine says. The latter is a script here."""

from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from engine_service.core.control import Ask, Pause, PauseMode
from engine_service.core.handoff import (
    BeginTransfer,
    Begun,
    EndTransfer,
    HasRoom,
    ImportPages,
    KvLayout,
    KvSource,
)
from engine_service.core.messages import Abort, Submit
from engine_service.core.params import DecodingChoice, SamplingParams
from engine_service.server import kv_sources
from engine_service.server.transfer_counts import TransferCounts
from engine_service.server.transfer_in import Fetches
from tests.certificates import Pair
from tests.service.engine_fixtures import config, pack
from tests.waiting import awake, until
from tidemill.runtime.errors import FailedPrecondition
from tidemill.telemetry.families import Families
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

PAGE = 16
INLINE = pb.KvPiece(num_tokens=PAGE, crc32=zlib.crc32(b"kv"), inline=b"kv")
SHARED = pb.KvPiece(num_tokens=PAGE, shared=pb.SharedPiece(pid=1, fd=2, size=2))


class Source(rpc.KvTransferServiceServicer):
    """Sends one piece and ends the call at once, well or not."""

    def __init__(self) -> None:
        self.piece = INLINE
        self.code = grpc.StatusCode.OK
        self.hosts: list[str] = []

    async def Transfer(self, requests: Any, context: Any) -> None:
        self.hosts.append((await context.read()).open.shared_host)
        await context.write(pb.TransferResponse(piece=self.piece))
        if self.code is not grpc.StatusCode.OK:
            await context.abort(self.code, "the engine is gone")


class Asks:
    """A core; `failure` is what an import ends in."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.imports: list[ImportPages] = []
        self.num_ended = 0
        self.has_room, self.num_looks, self.num_found = True, 0, 0
        self.importing = asyncio.Event()
        self.importing.set()

    async def ask(self, control: Any, **_: Any) -> Any:
        if isinstance(control, BeginTransfer):
            return Begun(1, 2 * PAGE, 0, 2, PAGE, self.has_room)
        if isinstance(control, HasRoom):
            self.num_looks += 1
            return {"num_found": self.num_found, "has_room": self.has_room}
        assert isinstance(control, ImportPages)
        self.imports.append(control)
        await self.importing.wait()
        if self.failure is not None:
            raise self.failure
        return True

    def post(self, control: Any) -> None:
        assert isinstance(control, EndTransfer)
        self.num_ended += 1


class Target:
    """Fetches, and who reads what they let go."""

    def __init__(self, connector: str, **flags: Any) -> None:
        self.asks, self.sources, self.addresses = Asks(), [Source(), Source()], []
        self.passed: list[Submit] = []
        self.servers: list[grpc.aio.Server] = []
        chosen = config(kv_connector=connector, **flags)
        asks: Any = self.asks
        forward: Callable[[Any], None] = self.passed.append
        counts = SimpleNamespace(transfers=TransferCounts(Families()))
        observer: Any = SimpleNamespace(metrics=counts, trace_of=lambda _: None)
        self.fetches = Fetches(chosen, asks, forward, observer)
        self.fetches.layout = KvLayout("m", "w", "float32", PAGE, 1, 1, 8)

    def submit(self, number: int) -> None:
        submit = Submit(
            key=len(self.passed) + 1,
            request_id="1",
            prompt=pack(*range(40)),
            sampling=SamplingParams(),
            decoding=DecodingChoice(),
            kv_source=KvSource(self.addresses[number]),
        )
        assert self.fetches.holds(submit)

    async def fetch(self, number: int = 0) -> None:
        """One request, until the core has it."""
        num_before = len(self.passed)
        self.submit(number)
        await until(lambda: len(self.passed) > num_before)
        assert self.passed[-1].kv_source is None
        await until(lambda: self.asks.num_ended > num_before)


def listen(server: grpc.aio.Server, shown: Pair | None) -> int:
    if shown is None:
        return server.add_insecure_port("127.0.0.1:0")
    chain = Path(shown.key).read_bytes(), Path(shown.cert).read_bytes()
    return server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([chain]))


@asynccontextmanager
async def target(connector: str, shown: Pair | None = None, **flags: Any) -> AsyncIterator[Target]:
    """Its sources speak TLS where they have a certificate to show."""
    made = Target(connector, **flags)
    servers = made.servers
    for source in made.sources:
        servers.append(grpc.aio.server())
        rpc.add_KvTransferServiceServicer_to_server(source, servers[-1])
        made.addresses.append(f"127.0.0.1:{listen(servers[-1], shown)}")
        await servers[-1].start()
    try:
        yield made
    finally:
        await made.fetches.close()
        for server in servers:
            await server.stop(None)


@pytest.mark.parametrize(
    ("connector", "piece", "why"),
    [
        ("grpc", SHARED, "shared memory came, and messages were asked for"),
        ("shm", INLINE, "a message came, and --kv-connector is shm here"),
        ("auto", SHARED, None),
        ("auto", INLINE, None),
        ("grpc", INLINE, None),
        ("shm", SHARED, None),
    ],
)
async def test_kv_comes_the_way_that_was_asked_for(
    caplog: pytest.LogCaptureFixture, connector: str, piece: Any, why: str | None
) -> None:
    """A prefill engine does not choose which files of other processes are read."""
    async with target(connector) as made:
        made.sources[0].piece = piece
        await made.fetch()
        assert len(made.asks.imports) == (why is None)
        assert made.sources[0].hosts == [made.fetches._host]
        assert (made.fetches._host == "") is (connector == "grpc")
        assert why is None or why in caplog.text


@pytest.mark.parametrize("connector", ["auto", "shm"])
async def test_memory_that_cannot_be_read_is_that_of_one_engine_for_a_while(
    monkeypatch: pytest.MonkeyPatch, connector: str
) -> None:
    async with target(connector) as made:
        first, second = made.sources
        first.piece = second.piece = SHARED
        made.asks.failure = FailedPrecondition("cannot read shared KV", reason="KV_SHARED")
        await made.fetch()
        made.asks.failure, first.piece = None, INLINE
        await made.fetch()
        await made.fetch(1)
        host = made.fetches._host
        assert first.hosts == [host, host if connector == "shm" else ""]
        assert second.hosts == [host]
        made.fetches._sources._apart.clear()
        monkeypatch.setattr(kv_sources, "_APART_S", 0.0)
        made.asks.failure, first.piece = FailedPrecondition("again", reason="KV_SHARED"), SHARED
        await made.fetch()
        made.asks.failure = None
        await made.fetch()
        assert first.hosts[-2:] == [host, host], "its time is over"


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE])
async def test_a_call_that_ends_behind_a_piece_is_no_bug(
    caplog: pytest.LogCaptureFixture, code: grpc.StatusCode
) -> None:
    async with target("grpc") as made:
        made.sources[0].code = code
        made.asks.importing.clear()
        fetch = asyncio.create_task(made.fetch())
        await until(lambda: made.asks.imports)
        await awake(0.2)  # for the end of the call to be here
        made.asks.importing.set()
        await fetch
        assert len(made.asks.imports) == 1
        assert not [one for one in caplog.records if one.levelno >= logging.ERROR], caplog.text
        assert ("the engine is gone" in caplog.text) is (code is not grpc.StatusCode.OK)


async def test_an_engine_out_of_reach_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prompts do not wait for a connection each time; those of others are fetched as ever."""
    monkeypatch.setattr(kv_sources, "_REST", 1e6)  # a minute, however soon it is refused
    async with target("grpc") as made:
        with socket.socket() as closed:  # bound, so that nobody else listens there
            closed.bind(("127.0.0.1", 0))
            made.addresses.append(f"127.0.0.1:{closed.getsockname()[1]}")
            await made.fetch(2)
            await made.fetch(0)
            assert len(made.asks.imports) == 1
            made.submit(2)
            assert len(made.passed) == 3, "the core has it at once"
            made.fetches._sources._resting.clear()
            made.submit(2)
            assert len(made.passed) == 3, "it is tried again"


async def test_a_prompt_without_room_is_computed_nowhere_until_there_is_some() -> None:
    """A prefill engine is not asked for KV that a full pool could not take."""
    async with target("grpc") as made:
        made.asks.has_room = False
        fetch = asyncio.create_task(made.fetch())
        await until(lambda: made.asks.num_looks >= 2)
        assert not made.sources[0].hosts
        assert made.fetches.num_held == 1
        made.asks.has_room = True
        await fetch
        assert len(made.asks.imports) == 1
        num_looks, made.asks.has_room = made.asks.num_looks, False
        made.submit(0)
        await until(lambda: made.asks.num_looks >= num_looks + 2)
        made.fetches.holds(Abort(2))
        assert [one.key for one in made.passed] == [1, 2], "whoever leaves waits for no room"
        await until(lambda: made.asks.num_ended == 2)
        assert len(made.sources[0].hosts) == 1


async def test_who_comes_when_the_last_one_has_left_is_fetched_for() -> None:
    """A fetch that is being ended brings nothing any more."""
    async with target("grpc") as made:
        made.asks.importing.clear()
        made.submit(0)
        await until(lambda: made.asks.imports)
        made.fetches.holds(Abort(1))
        made.submit(0)
        made.asks.importing.set()
        await until(lambda: len(made.passed) == 2)
        assert len(made.asks.imports) == 2
        await until(lambda: made.asks.num_ended == 2)


async def test_a_pause_that_ends_what_is_queued_ends_who_waits_for_kv() -> None:
    """They came to a core that was paused behind its answer, and went on when it was resumed."""
    async with target("grpc") as made:
        made.asks.importing.clear()
        made.submit(0)
        await until(lambda: made.asks.imports)
        for ticket, other in enumerate((HasRoom(1), Pause(PauseMode.WAIT), Pause(PauseMode.KEEP))):
            assert not made.fetches.holds(Ask(ticket, other))
        assert made.fetches.num_held == 1
        assert not made.fetches.holds(Ask(9, Pause(PauseMode.ABORT)))
        assert [one.key for one in made.passed] == [1], "the core has them ahead of the pause"
        assert made.fetches.num_held == 0
        await until(lambda: made.asks.num_ended == 1)
