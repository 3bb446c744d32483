"""Silent, hung and broken cores, the pause of a drain, and the engine's port for probes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_service.core.messages import Load, Tally
from engine_service.core.step import Memory
from engine_service.server.health import describe, verdict
from engine_service.server.launch import EngineServer
from engine_service.server.metrics import Reading
from engine_service.server.state import EngineState, Snapshot
from tests.service.engine_fixtures import config, engine, info, session, spec, stubs
from tests.service.fake_core import FACTS
from tests.service.frontends import frontend_for, write_tokenizer
from tests.service.test_engine_lifecycle import NOT_SERVING, SERVING, check, until_health
from tests.waiting import PATIENCE_S, http_client, stopwatch, until
from tidemill.runtime.errors import FailedPrecondition
from tidemill.v1 import engine_pb2 as pb

WITHIN_S = 10.0
"""In which a stopped rank must be seen as not ready."""


def pages(server: EngineServer) -> httpx.AsyncClient:
    return http_client(f"http://127.0.0.1:{server.metrics_port}")


async def test_a_stopped_rank_is_seen_and_comes_back() -> None:
    async with (
        engine(metrics_port=0) as server,
        stubs(server) as stub,
        session(stub) as client,
        info(server) as watcher,
        pages(server) as http,
    ):
        await until_health(server, "readiness", SERVING)
        watch = watcher.WatchState(pb.WatchStateRequest())
        os.kill(server._rank.pid, signal.SIGSTOP)
        try:
            with stopwatch() as awake_s:
                await until_health(server, "readiness", NOT_SERVING)
                assert awake_s() < WITHIN_S
            assert await check(server, "liveness") == SERVING
            assert "has said nothing for more than 5 s" in (await _newest(watch)).detail
            assert (await http.get("/health/ready")).status_code == 503
            assert (await http.get("/health/live")).status_code == 200
            assert (await http.get("/health")).json()["status"] == "unhealthy"
            while not (report := (await client.read()).load_report).stalled:
                pass
            assert report.engine_silence_ms > 5000
        finally:
            os.kill(server._rank.pid, signal.SIGCONT)
        await until_health(server, "readiness", SERVING)
        assert (await http.get("/health/ready")).status_code == 200
        watch.cancel()


async def _newest(watch: Any) -> Any:
    """The snapshot that says why it is not ready."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            seen = await watch.read()
            if "said nothing" in seen.detail:
                return seen


async def test_a_frontend_is_not_ready_while_its_engine_is_stalled(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with (
        engine(heartbeat_timeout_s=2.0) as server,
        frontend_for(server.port, tokenizer=str(tmp_path)) as frontend,
    ):
        await until(lambda: frontend.desk.fleet.state == "ready")
        os.kill(server._rank.pid, signal.SIGSTOP)
        try:
            await until(lambda: frontend.desk.fleet.state != "ready")
            assert frontend.desk.state == "stalled"
            async with http_client(f"http://127.0.0.1:{frontend.http_port}") as http:
                assert (await http.get("/health/ready")).status_code == 503
                assert (await http.get("/health")).json()["status"] == "unhealthy"
        finally:
            os.kill(server._rank.pid, signal.SIGCONT)
        await until(lambda: frontend.desk.fleet.state == "ready")


async def test_an_idle_core_is_heard_every_second() -> None:
    """The negative control of what follows from silence: none without a reason."""
    async with engine() as server:
        worst = 0
        for _ in range(60):
            await asyncio.sleep(0.05)
            worst = max(worst, server.desk.core.silence_ms)
        assert 500 < worst < 5000


@pytest.mark.parametrize("model", ["fake-broken", "hung"])
async def test_a_core_that_cannot_go_on_ends_the_process(model: str) -> None:
    """A broken device may hang a rank where it should end; and one may just hang."""
    flags = "model='fake', heartbeat_timeout_s=1.0, hang_timeout_s=3.0"
    if model == "fake-broken":
        flags = "model='fake-broken'"
    process = await asyncio.to_thread(_start, flags)
    try:
        assert process.stdout is not None
        port, rank = map(int, (await asyncio.to_thread(process.stdout.readline)).split())
        if model == "hung":
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await asyncio.wait_for(until_serving(channel), PATIENCE_S)
            os.kill(rank, signal.SIGSTOP)
        _, errors = await asyncio.to_thread(process.communicate, None, PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 1
    said = "illegal memory access" if model == "fake-broken" else "--hang-timeout-s"
    assert said in errors
    await until(lambda: not Path(f"/proc/{rank}").exists())


async def test_an_engine_that_slept_with_its_core_goes_on() -> None:
    """A frozen container, or Ctrl-Z: nobody was silent, nobody listened."""
    flags = "model='fake', heartbeat_timeout_s=1.0, hang_timeout_s=5.0"
    process = await asyncio.to_thread(_start, flags)
    try:
        assert process.stdout is not None
        port, rank = map(int, (await asyncio.to_thread(process.stdout.readline)).split())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(until_serving(channel), PATIENCE_S)
            for number, seconds in ((signal.SIGSTOP, 8.0), (signal.SIGCONT, 1.0)):
                os.kill(process.pid, number)
                await asyncio.sleep(0.1)  # it wakes up before its core
                os.kill(rank, number)
                await asyncio.sleep(seconds)
            assert process.poll() is None, "it was taken for dead"
            await asyncio.wait_for(until_serving(channel), PATIENCE_S)
    finally:
        process.kill()
        process.communicate()


async def test_probes_see_an_event_loop_that_hangs() -> None:
    """The port has threads of its own, and may not say what the loop said last."""
    flags = {"heartbeat_timeout_s": 1.5, "hang_timeout_s": 3.0}
    async with engine(metrics_port=0, **flags) as server:
        url = f"http://127.0.0.1:{server.metrics_port}/health"
        seen: dict[str, list[int]] = {"ready": [], "live": []}

        silence_ms: list[int] = []
        end = time.monotonic() + PATIENCE_S

        def is_over() -> bool:
            return all(503 in one for one in seen.values()) or time.monotonic() > end

        def ask() -> None:
            while not is_over():
                for name, statuses in seen.items():
                    status = httpx.get(f"{url}/{name}", timeout=PATIENCE_S).status_code
                    silence_ms.append(server.desk.core.silence_ms)
                    statuses.append(status)
                time.sleep(0.05)

        asking = asyncio.create_task(asyncio.to_thread(ask))
        await until(lambda: all(seen.values()))
        while not is_over():
            time.sleep(0.05)  # noqa: ASYNC251 - the loop hangs
        await asking
        for name, statuses in seen.items():
            assert (statuses[0], 503 in statuses) == (200, True), name
        # Both may turn between two looks of a busy machine; but none dies before its time.
        assert seen["live"].index(503) >= seen["ready"].index(503)
        assert silence_ms[-1] > 1000 * flags["hang_timeout_s"]
        await until_health(server, "readiness", SERVING)
        assert not server.desk.dead.is_set(), "the loop is back"


MAIN = """
import asyncio, sys
from engine_service.config import EngineConfig
from engine_service.server.launch import EngineServer
async def main():
    config = EngineConfig(engine_port=0, simulated_step_ms=2.0, {flags})
    server = await EngineServer.start(config, rank_module="tests.service.fake_core")
    print(server.port, server._rank.pid, flush=True)
    return await server.run()
sys.exit(asyncio.run(main()))
"""


def _start(flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN.replace("{flags}", flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


async def until_serving(channel: Any) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="readiness")):
        if answer.status == SERVING:
            return


async def test_a_drain_pauses_before_it_refuses() -> None:
    """Not ready at once, told to sessions at once; who has not heard of it is still served."""
    async with (
        engine(drain_pause_s=6.0) as server,
        stubs(server) as stub,
        session(stub) as client,
    ):
        draining = asyncio.create_task(server.drain())
        await until(lambda: server.desk.board.state is EngineState.DRAINING)
        await until_health(server, "readiness", NOT_SERVING)
        call = stub.Generate(pb.GenerateRequest(spec=spec(10, max_tokens=2)))
        assert (await call.read()).token_ids
        await client.submit(1, 10, max_tokens=2)
        await client.drain(1)
        assert client.ends[1][0].reason == pb.FINISH_REASON_LENGTH
        told = [i for i, frame in enumerate(client.frames) if frame.HasField("draining")]
        assert told, "the session was told before it was refused"
        await draining
        await client.submit(2, 10)
        await client.drain(2)
        assert client.ends[2][0].reason == "DRAINING"


async def test_a_frontend_pauses_too(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with (
        engine() as server,
        frontend_for(server.port, tokenizer=str(tmp_path), drain_pause_s=1.5) as frontend,
    ):
        await until(lambda: frontend.desk.fleet.state == "ready")
        draining = asyncio.create_task(frontend.drain())
        await until(lambda: frontend.desk.is_draining)
        assert frontend.desk.state == "draining"
        assert not frontend.desk._is_closed
        await draining
        assert frontend.desk._is_closed


async def test_stopping_while_it_loads_ends_watchers_and_is_no_failure() -> None:
    async with engine(model="fake-slow", wait=False) as server, info(server) as stub:
        await until(lambda: "weights" in server.desk.board.snapshot.detail)
        watch = stub.WatchState(pb.WatchStateRequest())
        assert (await watch.read()).state == pb.ENGINE_STATE_LOADING
        await server.drain()
        await server.stop()
        assert server.desk.board.state is EngineState.ERROR
        assert "stopped before it was ready" in server.desk.board.snapshot.detail


async def test_pages_of_the_port() -> None:
    async with engine(model="fake-slow", wait=False, metrics_port=0) as server:
        async with pages(server) as http:
            await until(lambda: "weights" in server.desk.board.snapshot.detail)
            answer = await http.get("/health/ready")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert (await http.get("/health/live")).status_code == 200
            found = (await http.get("/health")).json()
            assert (found["status"], found["model_loaded"]) == ("unhealthy", False)
            assert 'engine_state{model_name="",state="loading"} 1.0' in await _scrape(http)
            server.desk.core.tell("go on")
            await until(lambda: server.desk.board.state is EngineState.READY)
            found = (await http.get("/health")).json()
            assert (found["status"], found["device"], found["state"]) == ("healthy", "cpu", "ready")
            assert found["queue_capacity"] == FACTS.max_queued_requests
            text = await _scrape(http)
            assert 'engine_state{model_name="fake",state="ready"} 1.0' in text
            assert 'engine_state{model_name="fake",state="loading"} 0.0' in text
            assert (await http.get("/other")).status_code == 404
            assert (await http.post("/metrics")).status_code == 405
        taken = config(metrics_port=server.metrics_port)
        with pytest.raises(FailedPrecondition, match=r":\d+.*--metrics-port"):
            await EngineServer.start(taken, rank_module="tests.service.fake_core")


async def _scrape(http: httpx.AsyncClient) -> str:
    return (await http.get("/metrics")).text


def reading(**changes: Any) -> Reading:
    """Of an engine that is well, with a few things changed."""
    snapshot = Snapshot(1, EngineState.READY, "", load_of(), stalled=False)
    snapshot = snapshot._replace(**{k: v for k, v in changes.items() if k in Snapshot._fields})
    memory = changes.get("memory", Memory())
    return Reading(snapshot, Tally(memory=memory), FACTS, 0, 0, 1.0)


def load_of(**fields: int) -> Load:
    return Load(0, 0, 0, 0, 100)._replace(**fields)


def test_free_pages_are_no_use_of_memory() -> None:
    """A pool that takes nine tenths of a device is as it should be, until it is full."""
    memory = Memory(used=98, total=100, peak=98, kv=90)
    assert verdict(reading(memory=memory))[0] == "healthy"
    assert describe(reading(memory=memory), None)["memory_used_bytes"] == 8
    full = reading(memory=memory, load=load_of(pages_used=100))
    assert verdict(full) == ("degraded", ["device memory is nearly full"])
    waiting = reading(load=load_of(waiting=FACTS.max_queued_requests))
    assert verdict(waiting) == ("degraded", ["the queue is nearly full"])
    assert verdict(reading(state=EngineState.DRAINING)) == ("degraded", ["draining"])
    for bad in ({"stalled": True}, {"state": EngineState.ERROR}, {"state": EngineState.LOADING}):
        assert verdict(reading(**bad))[0] == "unhealthy"
