"""A generation that says nothing for a minute, under a client that pings every second."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.engine_fixtures import engine, pack
from tests.service.fake_core import LONG
from tests.service.frontends import frontend_for, write_tokenizer
from tests.waiting import PATIENCE_S
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc, text_pb2, text_pb2_grpc

pytestmark = pytest.mark.slow
SILENCE_S = 60.0
PINGS = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


async def test_a_silent_minute_survives_pings(tmp_path: Path) -> None:
    """At the engine's face and at the frontend's, which nobody reads to the end before the end."""
    async with asyncio.TaskGroup() as group:
        group.create_task(ask_engine())
        group.create_task(ask_frontend(tmp_path))


async def ask_frontend(folder: Path) -> None:
    """Its core computes one prompt token a step for more than a minute, and says nothing of it."""
    write_tokenizer(folder)
    step_ms = 1000 * (SILENCE_S + 2) / LONG
    async with (
        engine(simulated_step_ms=step_ms) as server,
        frontend_for(server.port, tokenizer=str(folder)) as frontend,
    ):
        assert await frontend.desk.fleet.wait_ready(PATIENCE_S)
        address = f"127.0.0.1:{frontend.grpc_port}"
        async with grpc.aio.insecure_channel(address, options=PINGS) as channel:
            stub = text_pb2_grpc.TextServiceStub(channel)
            prompt = {"tokens": {"token_ids": [65] * (LONG + 1)}}
            options = {"sampling": {"max_tokens": 1}}
            began = time.monotonic()
            answer = await asyncio.wait_for(
                stub.Generate(text_pb2.TextServiceGenerateRequest(prompt=prompt, options=options)),
                3 * SILENCE_S,
            )
            assert time.monotonic() - began > SILENCE_S
            assert answer.usage.output_tokens == 1


async def ask_engine() -> None:
    """One step takes the whole minute: no token, no header, nothing for a client to see."""
    flags = {"simulated_step_ms": 1000 * SILENCE_S + 2000, "hang_timeout_s": 0.0}
    async with engine(**flags) as server:
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address, options=PINGS) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            spec = pb.GenerateSpec(
                prompt_token_ids=pack(7), sampling=pb.SamplingParams(max_tokens=1)
            )
            began = time.monotonic()
            call = stub.Generate(pb.GenerateRequest(spec=spec))
            first = await asyncio.wait_for(call.read(), 3 * SILENCE_S)
            assert time.monotonic() - began > SILENCE_S
            assert first.token_ids == pack(7)


async def test_without_our_options_the_same_pings_end_the_connection() -> None:
    """The negative control: gRPC's own settings answer with GOAWAY, too_many_pings."""

    async def silent(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(SILENCE_S)
        return b""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(silent)
    handlers = grpc.method_handlers_generic_handler("test.Silent", {"Wait": handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=PINGS) as channel:
            call = channel.unary_unary("/test.Silent/Wait")(b"")
            with pytest.raises(grpc.aio.AioRpcError, match="Too many pings"):
                await asyncio.wait_for(call, PATIENCE_S - 5)
    finally:
        await server.stop(None)
