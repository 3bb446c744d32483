"""SubscribeKvEvents: a gateway's picture of the prefix index, against the engine's own."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from engine_service.server import kv_feed
from engine_service.server.kv_zmq import block_hash
from engine_service.server.launch import EngineServer
from tests.service.engine_fixtures import kv_events, rest
from tests.service.test_engine_kv_events import SMALL, index_of, real_engine, traffic
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

pb: Any = vllm_engine_pb2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineServer]:
    async with real_engine(tmp_path_factory.mktemp("model"), vllm_facade=True, **SMALL) as started:
        yield started


class Picture:
    """Blocks by their number, as a subscriber of the contract keeps them."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.seq = 0
        self.resyncs = 0

    def take(self, batch: Any) -> None:
        if batch.HasField("snapshot"):
            self.resyncs += batch.snapshot.index == 0
        else:
            assert batch.sequence_number == self.seq + 1, "a batch is missing"
        self.seq = batch.sequence_number
        for event in batch.events:
            if event.HasField("stored"):
                for block in event.stored.blocks:
                    self.blocks[block.block_hash] = list(block.token_ids)
            elif event.HasField("removed"):
                for one in event.removed.block_hashes:
                    del self.blocks[one]
            else:
                self.blocks = {}


@asynccontextmanager
async def watching(server: Any, picture: Picture) -> AsyncIterator[None]:
    """Subscribes from where the picture is."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        asked = common_pb2.SubscribeKvEventsRequest(start_sequence_number=picture.seq)
        call = stub.SubscribeKvEvents(asked)

        async def read() -> None:
            while (batch := await call.read()) is not grpc.aio.EOF:
                picture.take(batch)

        reader = asyncio.create_task(read())
        try:
            yield
        finally:
            call.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def agree(stub: Any, picture: Picture) -> None:
    """The picture holds what the engine says it holds."""
    now = await index_of(stub)
    await until(lambda: picture.seq >= now.seq)
    bits = struct.pack(f"<{len(now.units)}Q", *map(block_hash, now.units))
    assert set(picture.blocks) == set(struct.unpack(f"<{len(now.units)}q", bits))
    assert now.units, "nothing was kept"


async def test_a_gateway_rebuilds_the_index(
    server: EngineServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, picture = random.Random(seed), Picture()
    async with kv_events(server) as stub:
        await traffic(server, rng, 10)
        async with watching(server, picture):
            await until(lambda: picture.seq)
            await traffic(server, rng, 30)
            await agree(stub, picture)
            assert picture.resyncs == 1, "the snapshot at the start"
        await traffic(server, rng, 10)
        async with watching(server, picture):
            await agree(stub, picture)
            assert picture.resyncs == 1, "it goes on where it was"
        monkeypatch.setattr(kv_feed, "RING_BATCHES", 1)
        await traffic(server, rng, 20)
        async with watching(server, picture):
            await until(lambda: picture.resyncs == 2)
            await agree(stub, picture)


async def test_chunks_say_what_the_cache_had_of_the_prompt(server: EngineServer) -> None:
    """Of calls side by side, whose rows come out of the same steps."""
    asked = [
        pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=range(1, length + 1)),
            sampling_params=pb.SamplingParams(max_tokens=30, ignore_eos=True, n=2),
            stream=True,
        )
        for length in (6, 15)
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        await rest(stub.Generate(asked[1]))
        both = await asyncio.gather(*(rest(stub.Generate(one)) for one in asked))
    for answers, cached in zip(both, (4, 12), strict=True):
        chunks = [one.chunk.cached_tokens for one in answers if one.HasField("chunk")]
        ends = [one.complete.cached_tokens for one in answers if one.HasField("complete")]
        assert len(chunks) > len(ends) == 2
        assert set(chunks) == set(ends) == {cached}
