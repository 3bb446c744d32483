"""Writes tests/fixtures/golden anew from what the services of this release say: once a release.

python -m tests.golden.record
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc

from tests.golden.contract import IMAGE, Contract, Frame, frame, stored, write_frames
from tests.golden.peer import Heard, peer
from tests.service.engine_fixtures import engine, pack, rest, session, spec, stubs
from tests.service.frontends import frontend_for
from tests.service.test_engine_kv_events import SMALL, real_engine, traffic
from tests.waiting import PATIENCE_S
from tidemill.client import AsyncClient
from tidemill.runtime.errors import ServiceError
from tidemill.sampling_params import SamplingParams
from tidemill.v1 import engine_pb2, engine_pb2_grpc

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tidemill" / "builtin" / "demo"
MOST_BYTES = 4096
"""Longer messages (files of a tokenizer) are left out."""


def write_image() -> None:
    """What buf makes of proto/, without comments."""
    buf = str(Path(sys.executable).with_name("buf"))
    command = [buf, "build", "--exclude-source-info", "-o", str(IMAGE)]
    subprocess.run(command, cwd=ROOT, check=True)


async def raw_calls(port: int) -> None:
    """What a frontend does not ask by itself: pings, watched canvases, refusals, aborts."""
    async with stubs(_at(port)) as stub, session(stub) as client:
        await client.send(ping=engine_pb2.Ping(nonce=7))
        await client.submit(1, 65, max_tokens=2, emit_canvas=True)
        await client.submit(2)
        await client.submit(3, 66, max_tokens=30_000)
        await client.first_token(3)
        stopped = engine_pb2.StopMatched(handle=3, completion_tokens=1, stop_string="B")
        await client.send(stop_matched=stopped)
        await client.submit(4, 67, max_tokens=30_000)
        await client.first_token(4)
        await client.send(abort=engine_pb2.AbortHandles(handles=[4]))
        await client.drain(1, 2, 3, 4)
        asked = engine_pb2.GenerateRequest(spec=spec(65, max_tokens=2, request_id="golden"))
        await rest(stub.Generate(asked))
        await stub.Abort(engine_pb2.AbortRequest(request_ids=["golden", "unknown"]))
        await stub.Pool(engine_pb2.PoolRequest(prompt_token_ids=pack(65, 66), dimensions=2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        info = engine_pb2_grpc.EngineInfoServiceStub(channel)
        watching = info.WatchState(engine_pb2.WatchStateRequest())
        await watching.read()
        watching.cancel()


async def text_calls(port: int) -> None:
    """The public face."""
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        await client.generate("tide", SamplingParams(max_tokens=3, logprobs=1, n=2))
        await rest_of(client.generate_stream("ab", SamplingParams(max_tokens=30, stop="e")))
        await client.chat("hi", SamplingParams(max_tokens=2))
        await rest_of(client.chat_stream("hi", SamplingParams(max_tokens=2)))
        await client.embed(["tide", "mill"])
        await client.score([("tide", "mill")])
        await client.rerank("tide", ["mill", "tidal"])
        await client.detokenize(await client.tokenize("hello"))
        await client.list_models()
        try:
            await client.get_model("other")
        except ServiceError:
            return
        raise AssertionError("a model that is not there was found")


async def kv_calls(contract: Contract, heard: Heard) -> None:
    """What a prefix index holds, and one change of it."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            real_engine(Path(folder), **SMALL) as server,
            peer(server.port, contract, heard) as (port, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            await traffic(server, rng, 2)
            events = engine_pb2_grpc.KvEventServiceStub(channel)
            following = events.Subscribe(engine_pb2.SubscribeRequest())
            await following.read()
            await traffic(server, rng, 6)
            await following.read()
            following.cancel()


async def last_words(contract: Contract, heard: Heard) -> None:
    """What a session hears of a drain."""
    async with (
        engine() as server,
        peer(server.port, contract, heard) as (port, _),
        stubs(_at(port)) as stub,
        session(stub) as client,
    ):
        server.desk.drain()
        while (frame := await client.read()) is not None and not frame.HasField("draining"):
            pass


def _at(port: int) -> Any:
    """What `stubs` needs of a server."""
    return type("Server", (), {"port": port})


async def rest_of(stream: Any) -> None:
    async for _ in stream:
        pass


async def record() -> list[Frame]:
    """The frames of both hops: client to frontend, frontend to engine."""
    frames: list[Frame] = []

    def heard(method: str, is_request: bool, message: Any) -> None:
        if message.ByteSize() <= MOST_BYTES:
            frames.append(frame(method, is_request=is_request, message=message))

    contract = Contract(stored())
    async with (
        engine(tokenizer=str(DEMO)) as server,
        peer(server.port, contract, heard) as (port, _),
        frontend_for(port) as frontend,
        peer(frontend.grpc_port, contract, heard) as (public, _),
    ):
        await raw_calls(port)
        assert await frontend.desk.fleet.wait_ready(PATIENCE_S)
        await text_calls(public)
    await last_words(contract, heard)
    await kv_calls(contract, heard)
    return frames


if __name__ == "__main__":
    write_image()
    write_frames(asyncio.run(record()))
