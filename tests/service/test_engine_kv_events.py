"""KV events as routers get them, over gRPC and ZeroMQ, against what the engine says it holds."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio

from engine_service.core.journal import CacheCleared, KvEvents, PagesRemoved, PagesStored
from engine_service.server import kv_feed
from engine_service.server.kv_feed import KvBatch, KvFeed
from engine_service.server.kv_zmq import REPLAY_BATCHES, KvPublisher, block_hash
from engine_service.server.launch import EngineServer
from tests.service.engine_fixtures import admin, kv_events, session, stubs
from tests.service.test_engine_rank import real_engine
from tests.waiting import PATIENCE_S, awake, free_port, until
from tidemill.v1 import engine_pb2 as pb

SMALL = {"executor": "simulated", "page_size": 4, "num_pages": 40, "simulated_step_ms": 1.0}
"""40 pages of 4 tokens: prefixes are evicted all the time."""


class Mirror:
    """An index as a router keeps it: (parent, token ids) by hash."""

    def __init__(self) -> None:
        self.units: dict[bytes, tuple[bytes, bytes]] = {}
        self.seq = 0
        self.gaps = 0

    def take(self, answer: pb.SubscribeResponse) -> None:
        if answer.gap:
            self.units, self.gaps = {}, self.gaps + 1
        assert answer.snapshot or not self.seq or answer.seq == self.seq + 1, "a batch is missing"
        self.seq = answer.seq
        for event in answer.events:
            if event.HasField("stored"):
                stored, size = event.stored, 4 * event.stored.page_size
                parent = stored.parent_hash
                for number, one in enumerate(stored.page_hashes):
                    piece = stored.token_ids[size * number : size * (number + 1)]
                    self.units[one] = (parent, piece)
                    parent = one
            elif event.HasField("removed"):
                for one in event.removed.page_hashes:
                    del self.units[one]
            else:
                self.units = {}


async def index_of(stub: Any) -> Mirror:
    """What the engine holds, by a snapshot of its own."""
    call, mirror = stub.Subscribe(pb.SubscribeRequest()), Mirror()
    first = await call.read()
    assert first.gap
    assert first.snapshot
    mirror.take(first)
    call.cancel()
    return mirror


async def traffic(server: EngineServer, rng: random.Random, count: int) -> None:
    """Prompts that share beginnings, from few tokens to as many as there is room for."""
    stems = [[rng.randrange(3, 500) for _ in range(60)] for _ in range(3)]
    async with stubs(server) as stub, session(stub) as client:
        for handle in range(count):
            prompt = rng.choice(stems)[: rng.randint(1, 60)]
            salt = rng.choice(["", "", "salt"])
            await client.submit(handle, *prompt, max_tokens=rng.randint(1, 20), cache_salt=salt)
        await client.drain(*range(count))


@asynccontextmanager
async def mirroring(stub: Any, start_seq: int = 0) -> AsyncIterator[Mirror]:
    mirror, call = Mirror(), stub.Subscribe(pb.SubscribeRequest(start_seq=start_seq))

    async def read() -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            mirror.take(answer)

    reader = asyncio.create_task(read())
    try:
        yield mirror
    finally:
        call.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def test_a_router_rebuilds_the_index(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with real_engine(tmp_path, admin_port=0, **SMALL) as server, kv_events(server) as stub:
        await traffic(server, rng, 10)  # nobody listens yet
        async with mirroring(stub) as mirror:
            await until(lambda: mirror.seq)
            await traffic(server, rng, 60)
            now = await index_of(stub)
            await until(lambda: mirror.seq >= now.seq)
            assert mirror.units == now.units
            assert now.units, "nothing was kept"
            assert mirror.gaps == 1, "only the snapshot at the start"
        kept, last_seq = dict(mirror.units), mirror.seq
        await traffic(server, rng, 20)
        async with mirroring(stub, last_seq + 1) as resumed:
            resumed.units, resumed.seq = kept, last_seq
            now = await index_of(stub)
            await until(lambda: resumed.seq >= now.seq)
            assert (resumed.units, resumed.gaps) == (now.units, 0), "it goes on where it was"
            async with admin(server) as operator:
                answer = await operator.FlushCache(pb.FlushCacheRequest())
            assert answer.pages_flushed >= len(now.units) > 0
            await until(lambda: not resumed.units)
            assert not (await index_of(stub)).units
        async with mirroring(stub, start_seq=7) as stranger:  # of an engine that was before
            await until(lambda: stranger.gaps == 1)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The class shapes that readers of vLLM's events publish, written down here once more."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class ZmqMirror:
    def __init__(self) -> None:
        self.units: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.numbers: list[int] = []
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def take(self, number: bytes, payload: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big"))
        batch = self._decoder.decode(payload)
        assert batch.ts > 1.7e9
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case BlockStored():
                    parent, size = event.parent_block_hash, event.block_size
                    assert event.medium == "GPU"
                    for index, one in enumerate(event.block_hashes):
                        piece = event.token_ids[size * index : size * (index + 1)]
                        self.units[one] = (parent, tuple(piece))
                        parent = one
                case BlockRemoved():
                    for one in event.block_hashes:
                        del self.units[one]
                case AllBlocksCleared():
                    self.units = {}


async def replayed(context: zmq.asyncio.Context, address: str, start: int) -> ZmqMirror:
    mirror, asking = ZmqMirror(), context.socket(zmq.DEALER)
    asking.connect(address)
    await asking.send_multipart((b"", start.to_bytes(8, "big")))
    while True:
        _, number, payload = await asyncio.wait_for(asking.recv_multipart(), PATIENCE_S)
        if int.from_bytes(number, "big", signed=True) == -1:
            asking.close(linger=0)
            return mirror
        if start:  # what is removed was stored before
            mirror.numbers.append(int.from_bytes(number, "big"))
        else:
            mirror.take(number, payload)


async def test_routers_that_know_vllm_rebuild_the_index(tmp_path: Path, seed: int) -> None:
    rng, context = random.Random(seed), zmq.asyncio.Context()
    replay = f"tcp://127.0.0.1:{free_port()}"
    ipc = f"ipc://{tmp_path}/kv"
    settings = {"kv_events_zmq": ipc, "kv_events_replay": replay, "kv_events_topic": "kv@pod@m"}
    async with real_engine(tmp_path, **SMALL, **settings) as server, kv_events(server) as stub:
        sub, live = context.socket(zmq.SUB), ZmqMirror()
        sub.connect(ipc)
        sub.subscribe(b"kv@")
        await awake(2.0)  # PUB drops what was sent before a reader has joined

        async def read() -> None:
            while True:
                topic, number, payload = await sub.recv_multipart()
                assert topic == b"kv@pod@m"
                live.take(number, payload)

        reader = asyncio.create_task(read())
        await traffic(server, rng, 60)
        now = await index_of(stub)
        expected = {
            block_hash(one): (block_hash(parent) if parent else None, struct.unpack("<4I", piece))
            for one, (parent, piece) in now.units.items()
        }
        await until(lambda: live.units == expected or reader.done())
        assert not reader.done(), reader.exception()
        assert live.numbers == list(range(len(live.numbers)))
        again = await replayed(context, replay, 0)
        assert (again.units, again.numbers) == (live.units, live.numbers)
        assert (await replayed(context, replay, 5)).numbers == live.numbers[5:]
        reader.cancel()
        sub.close(linger=0)
    context.term()


async def test_the_ring_is_bounded_by_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event may tell of any number of units: a long prompt's are one."""
    monkeypatch.setattr(kv_feed, "RING_UNITS", 1000, raising=False)

    async def snapshot(seen: Any) -> Any:
        return seen([])

    feed = KvFeed(snapshot)
    reader = feed.follow(0)
    await anext(reader)
    hashes = tuple(number.to_bytes(2, "big") for number in range(400))
    for number in range(10):
        feed.publish(KvEvents(number, [PagesStored(hashes, b"", b"", 4, ""), CacheCleared()]))
    assert len(feed._ring) == 2
    assert (await anext(reader)).gap
    feed.publish(KvEvents(10, [PagesRemoved(hashes[:300])]))
    assert (len(feed._ring), feed._num_units) == (2, 701)
    feed.close()


async def test_a_slow_reader_gets_a_gap_and_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring holds three batches; whoever is further behind starts from a snapshot."""
    monkeypatch.setattr(kv_feed, "RING_BATCHES", 3)
    held: list[Any] = []

    async def snapshot(seen: Any) -> Any:
        await asyncio.sleep(0)
        return seen(list(held))

    feed = KvFeed(snapshot)
    reader = feed.follow(0)
    first = await anext(reader)
    assert (first.gap, first.is_snapshot, first.seq) == (True, True, feed.first_seq - 1)
    for number in range(10):
        stored = PagesStored((bytes([number]),), b"", b"", 4, "")
        held.append(stored)
        feed.publish(KvEvents(number, [stored]))
    late = await anext(reader)
    assert (late.gap, late.seq, list(late.events)) == (True, feed.first_seq + 9, held)
    feed.publish(KvEvents(11, [PagesRemoved((b"x",)), CacheCleared()]))
    live = await anext(reader)
    assert (live.gap, live.is_snapshot, live.seq) == (False, False, feed.first_seq + 10)
    assert len(feed._ring) == 3
    feed.close()
    assert [batch async for batch in reader] == []


async def test_a_large_index_comes_in_pieces() -> None:
    held = [PagesStored((number.to_bytes(2, "big"),), b"", b"", 4, "") for number in range(600)]

    async def snapshot(seen: Any) -> Any:
        return seen(held)

    reader = KvFeed(snapshot).follow(0)
    pieces = [await anext(reader) for _ in range(3)]
    assert [piece.gap for piece in pieces] == [True, False, False]
    assert [one for piece in pieces for one in piece.events] == held
    assert len({piece.seq for piece in pieces}) == 1


async def test_a_replay_is_whole_however_slowly_it_is_read() -> None:
    """More than ZeroMQ keeps for a reader by itself; the end's mark comes too."""
    address, context = f"tcp://127.0.0.1:{free_port()}", zmq.asyncio.Context()
    publisher = KvPublisher(f"tcp://127.0.0.1:{free_port()}", address, "")
    stored = PagesStored((bytes(8),), b"", bytes(4096), 1024, "")
    for number in range(REPLAY_BATCHES):
        publisher.publish(KvBatch(number, 0.0, [stored]))
    asking = context.socket(zmq.DEALER)
    asking.set_hwm(10)
    asking.connect(address)
    await asking.send_multipart((b"", bytes(8)))
    await asyncio.sleep(1)
    numbers = []
    async with asyncio.timeout(PATIENCE_S):
        while not numbers or numbers[-1] != -1:
            _, number, _ = await asking.recv_multipart()
            numbers.append(int.from_bytes(number, "big", signed=True))
    assert numbers == [*range(REPLAY_BATCHES), -1]
    asking.close(linger=0)
    await publisher.close()
    context.term()
