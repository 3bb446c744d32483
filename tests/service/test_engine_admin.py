"""AdminService on its own port, with a real core: pause, flush, drain, profile.

Whoever leaves the engine as it was shares one: its start is mostly an import of torch.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from engine_service.core.control import Resume
from engine_service.server.launch import EngineServer
from engine_service.server.state import EngineState
from tests.service.engine_fixtures import Client, admin, engine, session, stubs
from tests.service.test_engine_rank import real_engine
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIMULATED = {"executor": "simulated", "admin_port": 0, "simulated_step_ms": 5.0}
ROWS, PAGE = 4, 4
Operated = tuple[EngineServer, Any, Client]


@asynccontextmanager
async def operating(server: EngineServer) -> AsyncIterator[Operated]:
    async with admin(server) as operator, stubs(server) as stub, session(stub) as client:
        yield server, operator, client


@asynccontextmanager
async def real(tmp_path: Path, **values: Any) -> AsyncIterator[Operated]:
    """An engine of its own, whose core is real."""
    async with (
        real_engine(tmp_path, **{**SIMULATED, **values}) as server,
        operating(server) as found,
    ):
        yield found


@asynccontextmanager
async def faked() -> AsyncIterator[Operated]:
    """An engine of its own, for what the server says by itself while its core goes on."""
    async with engine(admin_port=0, simulated_step_ms=5.0) as server, operating(server) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineServer]:
    folder = tmp_path_factory.mktemp("shared")
    async with real_engine(folder, **SIMULATED, max_rows=ROWS, page_size=PAGE) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def operated(shared: EngineServer) -> AsyncIterator[Operated]:
    """The shared engine; a test that fails leaves it neither paused nor with requests."""
    async with operating(shared) as found:
        yield found
        await found[1].Resume(pb.ResumeRequest())
    await until(lambda: not shared.desk.sessions and not shared.desk.core.num_live)


def paused(mode: str) -> pb.PauseRequest:
    return pb.PauseRequest(mode=f"PAUSE_MODE_{mode}")


async def nothing_moves(server: EngineServer, client: Client) -> None:
    """Over a tenth of a second, twenty steps."""
    before, steps = dict(server.desk.core.finished), server.desk.core.load.steps
    await asyncio.sleep(0.1)
    assert (dict(server.desk.core.finished), server.desk.core.load.steps) == (before, steps)


async def test_the_port_of_operators_is_not_the_port_of_callers(
    operated: Operated, tmp_path: Path
) -> None:
    server, operator, _ = operated
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(address) as channel:
        outside = engine_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await outside.FlushCache(pb.FlushCacheRequest())
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await operator.FlushCache(pb.FlushCacheRequest())
    assert (await operator.FlushCache(pb.FlushCacheRequest())).pages_flushed == 0
    for call, request in (
        (operator.LoadAdapter, pb.LoadAdapterRequest(name="a", path="b")),
        (operator.ListAdapters, pb.ListAdaptersRequest()),
        (operator.StartProfile, pb.StartProfileRequest(directory=str(tmp_path))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as unserved:
            await call(request)
        error = to_error(unserved.value)
        assert (error.grpc_code, error.reason) == (12, "UNSUPPORTED"), error
    with pytest.raises(grpc.aio.AioRpcError) as unnamed:
        await operator.Pause(pb.PauseRequest())
    assert to_error(unnamed.value).param == "mode"


async def test_without_the_flag_nobody_is_served() -> None:
    async with engine() as server:
        assert server.sideline.admin_port is None


async def test_keep_freezes_everything_in_place(operated: Operated) -> None:
    server, operator, client = operated
    await client.submit(1, 5, 6, max_tokens=900)
    await client.first_token(1)
    await operator.Pause(paused("KEEP"))
    assert server.desk.board.snapshot.paused
    assert server.desk.core.load.running == 1
    await nothing_moves(server, client)
    await client.submit(2, 7, 8, max_tokens=3)
    await client.submit(3, 7, 8, max_tokens=3, timeout_ms=60)
    await client.drain(3)
    assert client.ends[3][0].reason == pb.FINISH_REASON_DEADLINE, "time goes on for the queued"
    assert 2 not in client.ends
    await operator.Resume(pb.ResumeRequest())
    await client.drain(1, 2)
    assert len(client.tokens[1]) == 900
    assert not server.desk.board.snapshot.paused


async def test_frontends_hear_of_a_pause_and_of_its_end(operated: Operated) -> None:
    async def hears(client: Client, is_paused: bool) -> None:
        frame = await client.read()
        while not frame.HasField("load_report") or frame.load_report.paused is not is_paused:
            frame = await client.read()

    _, operator, client = operated
    await operator.Pause(paused("WAIT"))
    await asyncio.wait_for(hears(client, True), PATIENCE_S)
    await operator.Resume(pb.ResumeRequest())
    await asyncio.wait_for(hears(client, False), PATIENCE_S)


async def test_wait_lets_what_runs_finish_and_holds_the_rest(operated: Operated) -> None:
    server, operator, client = operated
    await client.submit(1, 5, 6, max_tokens=60)
    await client.first_token(1)
    asked = asyncio.create_task(_call(operator))
    await until(lambda: server.desk.board.snapshot.paused)
    await client.submit(2, 7, 8, max_tokens=3)
    await client.drain(1)
    assert len(client.tokens[1]) == 60
    await asyncio.wait_for(asked, PATIENCE_S)
    await nothing_moves(server, client)
    await until(lambda: server.desk.core.load.waiting == 1)
    await operator.Resume(pb.ResumeRequest())
    await client.drain(2)


async def test_a_pause_behind_a_resume_is_what_frontends_hear_of(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the resume comes when the core has heard both."""
    server, operator, _ = operated
    await operator.Pause(paused("KEEP"))
    ask, heard, is_resumed = server.desk.core.asks.ask, asyncio.Event(), list[bool]()

    async def late(asked: Any) -> Any:
        told = await ask(asked)
        if isinstance(asked, Resume):
            is_resumed.append(True)
            await heard.wait()
        return told

    monkeypatch.setattr(server.desk.core.asks, "ask", late)
    resumed = asyncio.create_task(_resume(operator))
    await until(lambda: is_resumed)
    await operator.Pause(paused("KEEP"))
    heard.set()
    await resumed
    assert server.desk.board.snapshot.paused
    await operator.Resume(pb.ResumeRequest())
    assert not server.desk.board.snapshot.paused


async def _resume(operator: Any) -> None:
    await operator.Resume(pb.ResumeRequest())


async def _call(operator: Any) -> None:
    await operator.Pause(paused("WAIT"))


async def test_abort_ends_all_and_holds_what_comes(operated: Operated) -> None:
    server, operator, client = operated
    all_of_them = range(1, ROWS + 2)  # the last one is queued
    for handle in all_of_them:
        await client.submit(handle, 5, 6, max_tokens=900)
    await client.first_token(1)
    await operator.Pause(paused("ABORT"))
    await client.drain(*all_of_them)
    assert {client.ends[h][0].reason for h in all_of_them} == {pb.FINISH_REASON_ABORTED}
    assert not client.tokens.get(ROWS + 1)
    await client.submit(99, 7, 8, max_tokens=3)
    await nothing_moves(server, client)
    assert server.desk.core.load.pages_used == 0
    await operator.Resume(pb.ResumeRequest())
    await client.drain(99)


async def test_who_waits_for_a_pause_hears_that_it_was_ended(operated: Operated) -> None:
    server, operator, client = operated
    await client.submit(1, 5, 6, max_tokens=1500)
    await client.first_token(1)
    asked = asyncio.create_task(_call(operator))
    await until(lambda: server.desk.board.snapshot.paused)
    await asyncio.sleep(0.05)
    await operator.Resume(pb.ResumeRequest())
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asked
    assert to_error(ended.value).reason == "RESUMED"


async def test_a_flush_forgets_prefixes_under_way(operated: Operated) -> None:
    _, operator, client = operated
    prompt = list(range(3, 40))
    await client.submit(1, *prompt, max_tokens=2)
    await client.drain(1)
    await client.submit(2, *prompt, max_tokens=200)
    await client.first_token(2)
    assert (await operator.FlushCache(pb.FlushCacheRequest())).pages_flushed >= 9
    await client.submit(3, *prompt, max_tokens=2)
    await client.drain(2, 3)
    assert client.ends[2][0].usage.cached_tokens > 0
    assert client.ends[3][0].usage.cached_tokens == 0


async def end_when_asked(server: EngineServer) -> None:
    """What EngineServer.run does when it is asked to end."""
    await server.desk.stop.wait()
    await server.drain()


@pytest.mark.parametrize("limit_ms", [60_000, 2**64 - 1])
async def test_a_drain_answers_when_idle(tmp_path: Path, limit_ms: int) -> None:
    async with real(tmp_path) as (server, operator, client):
        await client.submit(1, 5, 6, max_tokens=40)
        await client.first_token(1)
        ending = asyncio.create_task(end_when_asked(server))
        await operator.Drain(pb.DrainRequest(timeout_ms=limit_ms))
        assert server.desk.core.num_live == 0
        await ending
        await client.drain(1)
        assert len(client.tokens[1]) == 40
        assert server.desk.board.state is EngineState.DRAINING


async def test_a_drain_answers_when_its_time_is_up() -> None:
    async with faked() as (server, operator, client):
        await client.submit(1, 5, 6, max_tokens=1900)
        await client.first_token(1)
        ending = asyncio.create_task(end_when_asked(server))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await operator.Drain(pb.DrainRequest(timeout_ms=50))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "1 requests still ran" in (late.value.details() or "")
        await ending


@pytest.mark.parametrize("later_ms", [50, 60_000])
async def test_who_asks_behind_others_can_only_hurry_a_drain(later_ms: int) -> None:
    async with faked() as (server, operator, client):
        await client.submit(1, 5, 6, max_tokens=1900)
        await client.first_token(1)
        ending = asyncio.create_task(end_when_asked(server))
        first = asyncio.ensure_future(operator.Drain(pb.DrainRequest(timeout_ms=1000)))
        await until(lambda: server.desk.board.state is EngineState.DRAINING)
        began = time.monotonic()
        later = asyncio.ensure_future(operator.Drain(pb.DrainRequest(timeout_ms=later_ms)))
        answers = await asyncio.gather(first, later, return_exceptions=True)
        seconds = time.monotonic() - began
        for answer in answers:
            assert isinstance(answer, grpc.aio.AioRpcError), answer
            assert to_error(answer).reason == "DRAIN_TIMEOUT"
            assert f"after {server.desk.patience.seconds:g} s" in (answer.details() or "")
        assert (seconds < 0.8) == (later_ms < 1000)
        assert server.desk.patience.seconds <= 1
        await ending


async def test_a_drain_whose_core_dies_is_not_said_to_have_gone_well() -> None:
    async with faked() as (server, operator, client):
        await client.submit(1, 5, 6, max_tokens=1900)
        await client.first_token(1)
        ending = asyncio.create_task(end_when_asked(server))
        drained = asyncio.ensure_future(operator.Drain(pb.DrainRequest()))
        await until(lambda: server.desk.board.state is EngineState.DRAINING)
        server._rank._process.kill()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await drained
        assert to_error(lost.value).reason == "ENGINE_DEAD"
        assert "SIGKILL" in (lost.value.details() or "")
        await ending


async def test_a_profile_is_a_chrome_trace(tmp_path: Path) -> None:
    async with real(tmp_path, executor="model", max_model_len=256, num_pages=32) as (
        _,
        operator,
        client,
    ):
        folder = tmp_path / "traces" / "new"
        with pytest.raises(grpc.aio.AioRpcError) as idle:
            await operator.StopProfile(pb.StopProfileRequest())
        assert to_error(idle.value).reason == "NOT_PROFILING"
        await operator.StartProfile(pb.StartProfileRequest(directory=str(folder)))
        with pytest.raises(grpc.aio.AioRpcError) as twice:
            await operator.StartProfile(pb.StartProfileRequest(directory=str(folder)))
        assert to_error(twice.value).reason == "PROFILING"
        await client.submit(1, 5, 6, max_tokens=5)
        await client.drain(1)
        files = (await operator.StopProfile(pb.StopProfileRequest())).files
        assert [Path(name).parent for name in files] == [folder]
        with gzip.open(files[0]) as trace:
            names = {event.get("name") for event in json.load(trace)["traceEvents"]}
        assert any("mm" in str(name) for name in names), "no matrix product in the trace"


async def test_the_trace_level_is_set_and_checked(operated: Operated) -> None:
    server, operator, _ = operated
    await operator.SetTraceLevel(pb.SetTraceLevelRequest(level=3))
    assert server.desk.observer.trace_level == 3
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await operator.SetTraceLevel(pb.SetTraceLevelRequest(level=4))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert to_error(refused.value).param == "trace_level"
    assert server.desk.observer.trace_level == 3
    await operator.SetTraceLevel(pb.SetTraceLevelRequest(level=1))
