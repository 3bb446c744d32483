"""A real engine server on a free loopback port, and short ways to talk to it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from engine_service.config import EngineConfig
from engine_service.core.messages import FinishReason
from engine_service.server.launch import EngineServer
from engine_service.server.state import EngineState
from tests.waiting import until
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc

FAKE = "tests.service.fake_core"


def config(**values: Any) -> EngineConfig:
    base = {"model": "fake", "engine_port": 0, "simulated_step_ms": 2.0, "drain_timeout_s": 60.0}
    return EngineConfig(**{**base, **values})


@asynccontextmanager
async def engine(*, wait: bool = True, **values: Any) -> AsyncIterator[EngineServer]:
    """Checks at the end that no task, route or process is left over."""
    before = asyncio.all_tasks()
    server = await EngineServer.start(config(**values), rank_module=FAKE)
    try:
        if wait:
            await until(lambda: server.desk.board.state >= EngineState.READY)
        yield server
    finally:
        await server.stop()
    await until(lambda: not (asyncio.all_tasks() - before))
    assert server.desk.core.num_live == 0
    assert not server.desk.sessions
    assert server._rank._process.poll() is not None


@asynccontextmanager
async def stubs(server: EngineServer, *options: Any) -> AsyncIterator[Any]:
    address = f"127.0.0.1:{server.port}"
    extra = [("grpc.use_local_subchannel_pool", 1), *options]
    async with grpc.aio.insecure_channel(address, channel_options(64 << 20) + extra) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


@asynccontextmanager
async def info(server: EngineServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield engine_pb2_grpc.EngineInfoServiceStub(channel)


def pack(*token_ids: int) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def spec(*prompt: int, max_tokens: int = 5, **fields: Any) -> pb.GenerateSpec:
    sampling = pb.SamplingParams(max_tokens=max_tokens)
    return pb.GenerateSpec(prompt_token_ids=pack(*prompt), sampling=sampling, **fields)


async def rest(call: Any) -> list[Any]:
    """What a stream still has to say; `read` and `async for` must not be mixed on one call."""
    found = []
    while (one := await call.read()) is not grpc.aio.EOF:
        found.append(one)
    return found


async def until_late(server: EngineServer, call: Callable[[float], Any]) -> None:
    """Calls with ever longer deadlines until the engine has counted one that passed.

    The deadline of a call may pass before the call has left its client; the client's own clock may
    cancel the call before the server's does, which counts as an abort; and the core may be first to
    say that it has passed, which ends the call well.
    """
    finished = server.desk.core.finished
    before = finished[FinishReason.DEADLINE]
    for attempt in range(40):
        try:
            answers = await rest(call(0.02 * 1.1**attempt))
        except grpc.aio.AioRpcError as late:
            if late.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        else:
            assert answers[-1].finish.reason == pb.FINISH_REASON_DEADLINE
        await until(lambda: server.desk.core.num_live == 0)
        if finished[FinishReason.DEADLINE] > before:
            return
    raise AssertionError(f"no deadline was counted: {finished}")


class Client:
    """One Session, frame by frame."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[Any]] = {}
        self.frames: list[Any] = []

    async def send(self, **frame: Any) -> None:
        await self.call.write(pb.SessionRequest(**frame))

    async def submit(self, handle: int, *prompt: int, **fields: Any) -> None:
        await self.send(submit=pb.Submit(handle=handle, spec=spec(*prompt, **fields)))

    async def read(self) -> Any:
        """One frame, sorted into tokens and ends; None at the end of the stream."""
        frame = await self.call.read()
        if frame is grpc.aio.EOF:
            return None
        self.frames.append(frame)
        if frame.HasField("failed"):
            self.ends.setdefault(frame.failed.handle, []).append(frame.failed)
        if frame.HasField("step"):
            step, offset = frame.step, 0
            for handle, count in zip(step.handles, step.counts, strict=True):
                got = unpack(step.token_ids[4 * offset : 4 * (offset + count)])
                self.tokens.setdefault(handle, []).extend(got)
                offset += count
            assert 4 * offset == len(step.token_ids)
            for row in step.finished:
                self.ends.setdefault(step.handles[row.row], []).append(row.finish)
        return frame

    async def drain(self, *handles: int) -> None:
        """Reads until every handle has ended."""
        while not all(handle in self.ends for handle in handles):
            assert await self.read() is not None, f"the stream ended; ends: {self.ends}"

    async def read_to_status(self) -> grpc.StatusCode:
        """Reads to the end of the stream."""
        try:
            while await self.read() is not None:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def first_token(self, handle: int) -> None:
        while not self.tokens.get(handle):
            assert await self.read() is not None
            assert handle not in self.ends, self.ends[handle]


@asynccontextmanager
async def session(stub: Any, *, major: int = 1) -> AsyncIterator[Client]:
    call = stub.Session()
    client = Client(call)
    try:
        await client.send(hello=pb.Hello(protocol_major=major, client_name="test"))
        ack = await client.read()
        assert ack is not None
        yield client
    finally:
        call.cancel()


@asynccontextmanager
async def admin(server: EngineServer) -> AsyncIterator[Any]:
    address = f"127.0.0.1:{server.sideline.admin_port}"
    async with grpc.aio.insecure_channel(address) as channel:
        yield engine_pb2_grpc.AdminServiceStub(channel)


@asynccontextmanager
async def kv_events(server: EngineServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield engine_pb2_grpc.KvEventServiceStub(channel)
