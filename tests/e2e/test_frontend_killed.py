"""A frontend that dies without a word: its requests end in the engine, nobody else's."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc

from tests.e2e.real_stack import (
    HOST,
    Stack,
    connected,
    engine,
    frontend,
    good,
    until_idle,
)
from tests.service.engine_fixtures import session
from tests.waiting import PATIENCE_S, eventually, free_port
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc, text_pb2

ENDLESS = pb.StopSpec(ignore_eos=True)


async def die_in_the_middle(stack: Stack, stub: object) -> None:
    """Four requests of the frontend run, two wait, one of another client runs; then kill -9."""
    sampling = pb.SamplingParams(max_tokens=2000)
    options = text_pb2.TextOptions(sampling=sampling, ignore_eos=True)
    request = text_pb2.GenerateStreamRequest(prompt={"text": "a"}, options=options)
    async with session(stub) as other, connected(stack) as faces:
        await other.submit(1, 5, 6, 7, max_tokens=1500, stop=ENDLESS)
        await other.first_token(1)
        calls = [faces.text.GenerateStream(request) for _ in range(5)]
        # Which of the five run is a matter of arrival, so nobody reads: their number says enough.
        await faces.until_busy(lambda running, waiting, *_: (running, waiting) == (4, 2))
        aborted = await faces.count("aborted")
        os.kill(stack.services["frontend"], signal.SIGKILL)
        # They end long before their 2,000 tokens, or they would not count as aborted.
        async with asyncio.timeout(PATIENCE_S):
            while (  # noqa: ASYNC110 (in another process)
                load := (await faces.state()).load
            ).running > 1 or load.waiting:
                await asyncio.sleep(0.02)
        assert await faces.count("aborted") == aborted + 5
        for call in calls:
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await other.drain(1)
        assert len(other.tokens[1]) == 1500
        assert other.ends[1][0].reason == pb.FINISH_REASON_LENGTH


async def test_the_engine_lets_go_and_a_new_frontend_works(tmp_path: Path) -> None:
    port = free_port()
    own = [*channel_options(64 << 20), ("grpc.use_local_subchannel_pool", 1)]
    with engine(tmp_path, port, "demo") as served:
        with frontend(tmp_path, port) as stack:
            await asyncio.to_thread(stack.wait_ready)
            handles = Stack(port, 0, 0)
            handles.services |= {"engine": served.pid, "rank": served.rank_pid}
            before = handles.num_handles()
            async with grpc.aio.insecure_channel(f"{HOST}:{port}", own) as channel:
                await die_in_the_middle(stack, engine_pb2_grpc.EngineServiceStub(channel))
        with frontend(tmp_path, port) as stack:
            await asyncio.to_thread(stack.wait_ready)
            async with connected(stack) as faces:
                await good(faces)
                await until_idle(faces)
            eventually(
                lambda: all(n <= before[who] + 2 for who, n in handles.num_handles().items()),
                f"open files before {before}, now {handles.num_handles()}",
            )
