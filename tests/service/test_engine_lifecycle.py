"""Start, drain, death and ports of the engine server; processes are real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine_service.core.messages import FinishReason
from engine_service.server import desk, tokenizer_files
from engine_service.server.launch import EngineServer
from engine_service.server.state import EngineState
from tests.service.engine_fixtures import (
    FAKE,
    config,
    engine,
    info,
    rest,
    session,
    spec,
    stubs,
)
from tests.service.frontends import write_tokenizer
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.errors import FailedPrecondition
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb

SERVING, NOT_SERVING = 1, 2
AT_ONCE_S = 20.0
"""Less than any timeout that could end a request whose core has died."""


async def check(server: EngineServer, name: str) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return int(answer.status)


async def until_health(server: EngineServer, name: str, status: int) -> None:
    """Health follows the state in a task of its own."""
    async with asyncio.timeout(PATIENCE_S):
        while await check(server, name) != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_port_answers_while_loading() -> None:
    async with engine(model="fake-slow", wait=False) as server, stubs(server) as stub:
        await until(lambda: "weights" in server.desk.board.snapshot.detail)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(spec=spec(1))).read()
        error = to_error(caught.value)
        assert (error.grpc_code, error.reason) == (14, "STARTING")
        assert "loading weights 1/4" in error.message
        await until_health(server, "liveness", SERVING)
        assert await check(server, "readiness") == NOT_SERVING
        server.desk.core.tell("go on")
        await until(lambda: server.desk.board.state is EngineState.READY)
        for name in ("readiness", "", "tidemill.v1.EngineService"):
            await until_health(server, name, SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(server, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_state_snapshot_then_changes() -> None:
    async with engine() as server, info(server) as stub, stubs(server) as work:
        watch = stub.WatchState(pb.WatchStateRequest())
        first = await watch.read()
        assert first.state == pb.ENGINE_STATE_READY
        call = work.Generate(pb.GenerateRequest(spec=spec(1, max_tokens=30_000), n=6))
        seen = [first]
        async with asyncio.timeout(PATIENCE_S):
            while seen[-1].state != pb.ENGINE_STATE_BUSY:
                seen.append(await watch.read())
            call.cancel()
            while seen[-1].state == pb.ENGINE_STATE_BUSY:
                seen.append(await watch.read())
        revisions = [one.revision for one in seen]
        assert revisions == sorted(set(revisions))
        assert seen[-1].load.waiting == 0


async def test_health_watch_lasts() -> None:
    async with (
        engine(model="fake-slow", wait=False) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == NOT_SERVING
        server.desk.core.tell("go on")
        assert (await asyncio.wait_for(watch.read(), PATIENCE_S)).status == SERVING
        server.desk.drain()
        assert (await asyncio.wait_for(watch.read(), PATIENCE_S)).status == NOT_SERVING
        watch.cancel()


async def test_drain_finishes_running_requests_and_refuses_new_ones() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        await client.submit(1, 10, max_tokens=100)
        await client.first_token(1)
        draining = asyncio.create_task(server.drain())
        await until(lambda: server.desk.board.state is EngineState.DRAINING)
        await client.submit(2, 20)
        await client.drain(1, 2)
        assert client.tokens[1] == list(range(10, 110))
        refused = client.ends[2][0]
        assert (refused.code, refused.reason, refused.retriable) == (14, "DRAINING", True)
        assert any(frame.HasField("draining") for frame in client.frames)
        await draining


async def test_drain_timeout_ends_what_is_left() -> None:
    async with (
        engine(drain_timeout_s=0.2) as server,
        stubs(server) as stub,
        session(stub) as client,
    ):
        await client.submit(1, 10, max_tokens=30_000)
        await client.first_token(1)
        await server.drain()
        await client.drain(1)
        assert client.ends[1][0].reason == "DRAIN_TIMEOUT"
        assert client.tokens[1] == list(range(10, 10 + len(client.tokens[1])))


async def test_killed_core_ends_every_request_and_says_why() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        await client.submit(1, 10, max_tokens=30_000)
        call = stub.Generate(pb.GenerateRequest(spec=spec(1, max_tokens=30_000)))
        await call.read()
        await client.first_token(1)
        os.kill(server._rank.pid, signal.SIGKILL)
        began = time.monotonic()
        await client.drain(1)
        assert client.ends[1][0].reason == "ENGINE_DEAD"
        assert "SIGKILL" in client.ends[1][0].message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert to_error(caught.value).reason == "ENGINE_DEAD"
        assert await client.read_to_status() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < AT_ONCE_S
        assert server.desk.board.state is EngineState.ERROR
        assert server.desk.core.finished[FinishReason.ERROR] == 2
        await until_health(server, "liveness", NOT_SERVING)


@pytest.mark.parametrize(
    ("model", "words"),
    [("fake-fatal", "the engine core is gone: "), ("fake-refused", "cannot start: ")],
)
async def test_last_words_of_a_core_that_cannot_start(model: str, words: str) -> None:
    async with engine(model=model, wait=False) as server:
        await until(lambda: server.desk.board.state is EngineState.ERROR)
        assert server.desk.board.snapshot.detail == f"{words}the fake model has no weights"


async def test_a_taken_port_is_a_clear_error_and_leaves_no_process() -> None:
    async with engine() as server:
        with pytest.raises(FailedPrecondition, match=rf":{server.port}.*--engine-port"):
            await EngineServer.start(config(engine_port=server.port), rank_module=FAKE)


MAIN = """
import asyncio, sys
from engine_service.config import EngineConfig
from engine_service.server.launch import EngineServer
async def main():
    config = EngineConfig(model="fake", engine_port=0, simulated_step_ms=2.0, drain_timeout_s=900)
    server = await EngineServer.start(config, rank_module="tests.service.fake_core")
    print(server.port, server._rank.pid, flush=True)
    return await server.run()
sys.exit(asyncio.run(main()))
"""


class Process:
    """An engine server in a process of its own, with signal handlers."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", MAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root
        )
        assert self.popen.stdout is not None
        self.port, self.rank_pid = map(int, self.popen.stdout.readline().split())

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()

    async def wait(self) -> int:
        """Its status; sooner than a drain of 30,000 tokens."""
        code = await asyncio.to_thread(self.popen.wait, AT_ONCE_S)
        await until(lambda: not _alive(self.rank_pid))
        return code


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def _busy(stub: Any, max_tokens: int) -> tuple[Any, Any]:
    """A running call and what it has said: all of it, perhaps, as tokens merge."""
    request = pb.GenerateRequest(spec=spec(1, max_tokens=max_tokens))
    while True:
        call = stub.Generate(request, wait_for_ready=True)
        try:
            return call, await call.read()
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)


async def _until_draining(process: Process) -> None:
    async with info(process) as stub:
        async for snapshot in stub.WatchState(pb.WatchStateRequest()):
            if snapshot.state == pb.ENGINE_STATE_DRAINING:
                return


@pytest.mark.parametrize("how", ["sigterm", "twice", "kill-rank", "kill-server"])
async def test_ends_of_the_process(how: str) -> None:
    with await asyncio.to_thread(Process) as process:
        await _end(process, how)


async def _end(process: Process, how: str) -> None:
    async with stubs(process) as stub:
        call, first = await _busy(stub, 500 if how == "sigterm" else 30_000)
        if how in ("sigterm", "twice"):
            process.popen.send_signal(signal.SIGTERM)
        if how == "sigterm":
            answers = [first, *await rest(call)]
            assert answers[-1].finish.reason == pb.FINISH_REASON_LENGTH
            assert await process.wait() == 0
        elif how == "twice":
            await _until_draining(process)
            process.popen.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest(call)
            error = to_error(caught.value)
            assert (error.grpc_code, error.reason) == (14, "DRAIN_TIMEOUT")
            assert error.retry_after_ms == 1000
            assert await process.wait() == 0
        elif how == "kill-rank":
            os.kill(process.rank_pid, signal.SIGKILL)
            assert await process.wait() == 1
        else:
            process.popen.kill()
            assert await process.wait() == -signal.SIGKILL


async def test_reflection_is_behind_a_flag() -> None:
    for flag in (True, False):
        async with (
            engine(reflection=flag) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            if flag:
                await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                answer = await call.read()
                names = {one.name for one in answer.list_services_response.service}
                assert {"tidemill.v1.EngineService", "grpc.health.v1.Health"} <= names
            else:
                assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            call.cancel()


async def test_a_server_whose_ticker_fails_does_not_look_well_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as server:
        monkeypatch.setattr(server.desk.board, "observe", lambda *given, **more: 1 / 0)
        await until(lambda: server.desk.dead.is_set())
        assert server.desk.board.state is EngineState.ERROR
        assert "ZeroDivisionError" in server.desk.board.snapshot.detail


async def test_a_tokenizer_that_cannot_be_read_is_told_and_ends_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)

    def refused(folder: Path, name: str, config: bytes | None) -> Any:
        raise PermissionError(13, "Permission denied", str(folder / name))

    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_files, "_opened", refused)
        async with engine(tokenizer=str(tmp_path)) as server, info(server) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match=r"tokenizer.*Permission denied") as told:
                await rest(stub.GetTokenizer(pb.GetTokenizerRequest()))
            assert to_error(told.value).reason == "TOKENIZER_UNREADABLE"


async def test_a_bug_in_reading_a_tokenizer_ends_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "read_tokenizer", lambda folder, overrides: 1 / 0)
    async with engine() as server, info(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=r"tokenizer.*division") as told:
            await rest(stub.GetTokenizer(pb.GetTokenizerRequest()))
        assert told.value.code() is grpc.StatusCode.INTERNAL


async def test_a_configuration_nested_too_deeply_is_served_as_it_lies(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    said = {"id2label": {"0": "spam"}}
    async with engine(tokenizer=str(tmp_path), hf_overrides=said) as server:
        found = server.desk.open_tokenizer()
        assert found.read("config.json") == (tmp_path / "config.json").read_bytes()


@pytest.mark.parametrize(("facts", "when"), [(None, "loading"), (object(), "draining")])
async def test_a_core_that_is_lost_behind_the_signal_was_loading_or_drained(
    caplog: pytest.LogCaptureFixture, facts: object, when: str
) -> None:
    async def nothing() -> None:
        return None

    stop = asyncio.Event()
    stop.set()
    core = SimpleNamespace(lost="rank 0 ended")
    desk = SimpleNamespace(stop=stop, dead=asyncio.Event(), core=core, facts=facts)
    server: Any = SimpleNamespace(desk=desk, drain=nothing, stop=nothing)
    assert await EngineServer.run(server) == 1
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    assert f"rank 0 ended while {when}" in caplog.text
