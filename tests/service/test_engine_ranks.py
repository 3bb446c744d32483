"""An engine server over several ranks: served tokens, and what is left when a rank is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from engine_service.server.launch import EngineServer
from engine_service.server.rank_process import RANK_MODULE
from engine_service.server.state import EngineState
from tests.service.engine_fixtures import config, info, session, stubs
from tests.waiting import PATIENCE_S, stopwatch, until
from tidemill.v1 import engine_pb2 as pb

BOUND_S = 5.0
AWAKE_S = BOUND_S + 1.0
"""On a stopwatch, which does not stand still in quite the same moments as the ranks."""
START_S = 3 * PATIENCE_S
FAULTY = "tests.service.faulty_ranks"


def children(pid: int) -> list[int]:
    """Of any of its threads, oldest first."""
    found = list[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += map(int, task.read_text().split())
    return sorted(found)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def ports_of(pids: list[int]) -> set[str]:
    """Inodes of their TCP sockets that listen."""
    held = set()
    for pid in pids:
        links = Path(f"/proc/{pid}/fd").iterdir()
        held |= {os.readlink(link)[8:-1] for link in links if "socket:" in os.readlink(link)}
    return held & listening()


def named_memory() -> set[str]:
    """But what is named by the driver of a device and by NCCL, who clean up themselves, or not."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("cuda.shm", "nccl-"))}


LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def listening(beyond: tuple[str, ...] = ()) -> set[str]:
    """Inodes of sockets that listen, but not those on an address of `beyond`."""
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return {
        fields[9] for fields in lines if fields[3] == "0A" and fields[1].split(":")[0] not in beyond
    }


@asynccontextmanager
async def ranks(
    module: str = RANK_MODULE, size: int = 2, num_stages: int = 1, **flags: Any
) -> AsyncIterator[EngineServer]:
    chosen = {"model": "demo", "device": "cpu", "max_rows": 4, "log_level": "warning", **flags}
    sizes = {"tensor_parallel_size": size // num_stages, "pipeline_parallel_size": num_stages}
    server = await EngineServer.start(config(**sizes, **chosen), rank_module=module)
    try:
        yield server
    finally:
        await server.stop()
    assert server._rank._process.poll() is not None


async def serving(server: EngineServer) -> list[int]:
    """Waits until it serves; returns the process ids of its ranks."""
    await until(lambda: server.desk.board.state >= EngineState.READY, START_S)
    assert server.desk.board.state is EngineState.READY, server.desk.board.snapshot
    pids = [server._rank.pid, *children(server._rank.pid)]
    assert len(pids) == 2
    return pids


async def lose(rank: int, sent: signal.Signals, num_stages: int, **flags: Any) -> None:
    """Loses a rank under load, so that the other one stands in a collective, waiting for it, or for
    what it passes on or decides."""
    named = named_memory()
    async with ranks(num_stages=num_stages, **flags) as server:
        pids = await serving(server)
        ports = ports_of(pids)
        assert ports  # the ranks met somewhere
        async with info(server) as asked:
            facts = await asked.GetEngineInfo(pb.GetEngineInfoRequest())
        told = facts.tensor_parallel_size, facts.pipeline_parallel_size
        assert told == (2 // num_stages, num_stages)
        async with stubs(server) as stub, session(stub) as client:
            for handle in range(1, 7):
                await client.submit(handle, 84, 104, 101, handle, max_tokens=1900)
            await client.first_token(1)
            with stopwatch() as awake_s:
                os.kill(pids[rank], sent)
                await asyncio.wait_for(server.desk.dead.wait(), PATIENCE_S)
                assert awake_s() < AWAKE_S
                await until(lambda: server._rank._process.poll() is not None)
                await until(lambda: all(map(is_gone, pids)))
                assert awake_s() < AWAKE_S
            await client.drain(*range(1, 7))
        assert {client.ends[handle][0].reason for handle in range(1, 7)} == {"ENGINE_DEAD"}
        assert server._rank._process.returncode != 0
        said = str(server.desk.core.lost)
        assert not ports & listening()
    await until(lambda: not named_memory() - named)  # others may name some for a moment
    if rank == 0:
        assert "was killed by SIGKILL" in said
    elif sent is signal.SIGKILL:
        assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in said
    else:
        assert f"rank 1 (pid {pids[1]}) has shown no life for " in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sent", "num_stages"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGKILL, 2)]
)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_lost_rank_ends_the_engine_and_every_stream(
    rank: int, sent: signal.Signals, num_stages: int, capfd: pytest.CaptureFixture[str]
) -> None:
    await lose(rank, sent, num_stages)
    if rank == 0:
        assert ("rank 0 has shown no life for " in capfd.readouterr().err) == (sent == 19)


@pytest.mark.timeout(300)
async def test_a_stop_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_service.server.launch._LEAVING_S", PATIENCE_S)  # nobody is killed
    async with ranks() as server:
        pids = await serving(server)
        ports = ports_of(pids)
        assert not ports & listening(LOOPBACK), "other machines can speak to the ranks"
        async with stubs(server) as stub, session(stub) as client:
            await client.submit(1, 84, 104, 101, max_tokens=8)
            await client.drain(1)
        assert len(client.tokens[1]) == 8
    assert server._rank._process.returncode == 0
    assert all(map(is_gone, pids))
    assert not ports & listening()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("refuse", r"model-00002-of-00002.safetensors is missing"),
        ("bug", "KeyError: 'lm_head'"),
    ],
)
async def test_what_one_rank_cannot_load_is_told(
    fault: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_TEST_FAULT", fault)
    async with ranks(FAULTY) as server:
        await until(lambda: server.desk.board.state is EngineState.ERROR, START_S)
        detail = server.desk.board.snapshot.detail
        assert "rank 1 (pid" in detail
        assert told in detail


@pytest.mark.timeout(300)
async def test_a_step_that_fails_on_one_rank_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDEMILL_TEST_FAULT", "step")
    async with ranks(FAULTY) as server:
        await serving(server)
        async with stubs(server) as stub, session(stub) as client:
            await client.submit(1, 84, 104, 101, max_tokens=200)
            await client.drain(1)
        assert client.ends[1][0].reason == "ENGINE_DEAD"
        assert "rank 1 (pid" in str(server.desk.core.lost)
        assert "RuntimeError: device-side assert" in str(server.desk.core.lost)
