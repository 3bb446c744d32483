"""A prefill and a decode engine as an operator runs them, and either one killed in a transfer."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.real_stack import HOST, START_S, engine, is_gone
from tests.service.engine_fixtures import rest
from tests.service.test_kv_transfer import answer, asking
from tests.waiting import PATIENCE_S, free_port, stopwatch, until
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

PROMPT = [3 + i % 40 for i in range(400)]
ENDS_S = 5.0
"""While this process is awake."""


@asynccontextmanager
async def stubs(port: int) -> Any:
    own = [*channel_options(64 << 20), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"{HOST}:{port}", own) as channel:
        yield rpc.EngineServiceStub(channel), rpc.EngineInfoServiceStub(channel)


async def load_of(info: Any) -> tuple[int, int, int]:
    call = info.WatchState(pb.WatchStateRequest())
    try:
        load = (await call.read()).load
        return load.running, load.waiting, load.pages_used
    finally:
        call.cancel()


def memory_files(pid: int) -> int:
    """Shared files without a name that a process holds."""
    links = (os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir())
    return sum("memfd:tidemill-kv" in one for one in links)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("dies", ["prefill", "decode"])
async def test_killed_in_a_transfer(tmp_path: Path, dies: str) -> None:
    ports = free_port(), free_port()
    with (
        engine(tmp_path, ports[0], "--model=demo", "--role=prefill") as source,
        engine(tmp_path, ports[1], "--model=demo", "--role=decode") as target,
    ):
        async with stubs(ports[0]) as (_, theirs), stubs(ports[1]) as (here, ours):
            for info in (theirs, ours):
                await up(info)
            right, _ = await answer(here, asking(PROMPT, cache_salt="alone"))
            address = f"{HOST}:{ports[0]}"
            request = asking(PROMPT, address, cache_salt="well")
            assert await answer(here, request) == (right, len(PROMPT) // 16 * 16 - 16)
            ranks = source.rank_pid, target.rank_pid
            kept = memory_files(ranks[0])
            os.kill(ranks[0], signal.SIGSTOP)
            request = asking(PROMPT, address, cache_salt="killed")
            held = asyncio.create_task(rest(here.Generate(request)))
            await until_waiting(ours)
            with stopwatch() as awake_s:
                if dies == "prefill":
                    os.kill(source.pid, signal.SIGKILL)
                    tokens = b"".join(one.token_ids for one in await held)
                    await until(lambda: is_gone(ranks[0]))
                else:
                    os.kill(target.pid, signal.SIGKILL)
                    with pytest.raises(grpc.aio.AioRpcError):
                        await held
                    await until(lambda: is_gone(ranks[1]))
                    os.kill(ranks[0], signal.SIGCONT)
                    while await load_of(theirs) != (0, 0, 0):  # noqa: ASYNC110 (in another process)
                        await asyncio.sleep(0.05)
                assert awake_s() < ENDS_S
            if dies == "prefill":
                assert len(tokens) == 4 * len(right)
                again = asking(PROMPT, address, cache_salt="gone")
                assert await answer(here, again) == (right, 0)
            else:  # what is used again
                assert memory_files(ranks[0]) == kept > 0


async def up(info: Any) -> None:
    """Waits until the engine is ready."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                call = info.WatchState(pb.WatchStateRequest())
                while (await call.read()).state != pb.ENGINE_STATE_READY:
                    pass
                call.cancel()
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)


async def until_waiting(info: Any) -> None:
    """Until a request is held back for its transfer."""
    async with asyncio.timeout(PATIENCE_S):
        while (await load_of(info))[1] != 1:  # noqa: ASYNC110 (in another process)
            await asyncio.sleep(0.02)
