"""What a supervisor asks: of an engine its state and what it serves, of a frontend its health."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidemill.runtime.errors import EngineDead
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import engine_pb2, engine_pb2_grpc

_MESSAGE_BYTES = 4 << 20
_ANSWER_S = 10.0
"""Whoever takes a connection and says nothing is asked again on another one."""
_OTHERS_S = 10.0  # a frontend asks an engine that was away again within half of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a ready engine says of itself."""

    model: str
    architecture: str
    dtype: str
    device: str
    method: str
    page_size: int
    num_pages: int
    max_rows: int
    max_model_len: int

    @property
    def kv_tokens(self) -> int:
        return self.page_size * self.num_pages


async def stages(address: str) -> AsyncIterator[str]:
    """What the engine is doing (`weights 3/12`), ending when it is ready.

    Waits for the engine to come up. Raises EngineDead when it reports an error.
    """
    states = engine_pb2.EngineState
    ready = (states.ENGINE_STATE_READY, states.ENGINE_STATE_BUSY)
    async with grpc.aio.insecure_channel(
        address, options=channel_options(_MESSAGE_BYTES)
    ) as channel:
        stub = engine_pb2_grpc.EngineInfoServiceStub(channel)
        call = stub.WatchState(engine_pb2.WatchStateRequest(), wait_for_ready=True)
        try:
            async for answer in call:
                if answer.state in ready:
                    return
                if answer.state == states.ENGINE_STATE_ERROR:
                    raise EngineDead(answer.detail)
                yield answer.detail
        finally:
            call.cancel()


async def serving(address: str) -> Serving:
    """What a ready engine serves."""
    async with grpc.aio.insecure_channel(
        address, options=channel_options(_MESSAGE_BYTES)
    ) as channel:
        stub = engine_pb2_grpc.EngineInfoServiceStub(channel)
        answer = await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10.0)
    return Serving(
        model=answer.model_id,
        architecture=answer.architecture,
        dtype=answer.dtype,
        device=answer.device,
        method=answer.decoding.default_method,
        page_size=answer.cache.page_size,
        num_pages=answer.cache.num_pages,
        max_rows=answer.limits.max_rows,
        max_model_len=answer.limits.max_model_len,
    )


async def probed(address: str, every_s: float) -> None:
    """Returns as soon as the health port at `address` says SERVING of readiness."""
    question = health_pb2.HealthCheckRequest(service="readiness")
    wanted = health_pb2.HealthCheckResponse.SERVING
    async with grpc.aio.insecure_channel(
        address, options=channel_options(_MESSAGE_BYTES)
    ) as channel:
        check, status = health_pb2_grpc.HealthStub(channel).Check, None
        while status != wanted:
            await asyncio.sleep(every_s)
            status = (await check(question, wait_for_ready=True)).status


async def healthy(host: str, port: int, every_s: float) -> None:
    """Returns when GET /health answers that all is well, or some time after it was 200 first: the
    frontend is ready with one engine and may still be on its way to others."""
    ask = b"GET /health HTTP/1.1\r\nHost: tidemill\r\nConnection: close\r\n\r\n"
    loop = asyncio.get_running_loop()
    until = None
    while until is None or loop.time() < until:
        await asyncio.sleep(every_s)
        answer = b""
        with contextlib.suppress(OSError):  # being late is one
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.closing(writer):
                    writer.write(ask)
                    answer = await reader.read()
        if answer.startswith(b"HTTP/1.1 200 "):
            if b'"status":"healthy"' in answer.replace(b" ", b""):
                return
            until = until or loop.time() + _OTHERS_S
