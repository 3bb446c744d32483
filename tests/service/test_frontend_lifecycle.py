"""Engines that are late, die or drain; clients that leave; and the end of a frontend."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.service.fake_engine import serving
from tests.service.frontends import frontend_for, make_engine, stack
from tests.waiting import PATIENCE_S, free_port, http_client, until
from tidemill.client import AsyncClient
from tidemill.runtime.errors import FailedPrecondition, Unavailable
from tidemill.sampling_params import SamplingParams
from tidemill.v1 import engine_pb2 as pb

ROOT = Path(__file__).parents[2]


async def test_a_frontend_starts_without_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for it at a steady pace, however long it is away."""
    monkeypatch.setattr("frontend.engine_client._FIRST_BACKOFF_S", 0.123)
    real, pauses = asyncio.sleep, list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    fake, _ = make_engine(tmp_path)
    port = free_port()
    async with frontend_for(port) as frontend:
        url = f"http://127.0.0.1:{frontend.http_port}"
        grpc_address = f"127.0.0.1:{frontend.grpc_port}"
        async with http_client(url) as client, AsyncClient(grpc_address) as text:
            for path in ("/v1/models", "/health", "/health/ready", "/v1/health"):
                answer = await client.get(path)
                assert answer.status_code == 503, path
                assert answer.headers["retry-after"] == "1"
            assert (await client.get("/health/live")).status_code == 200
            metrics = (await client.get("/metrics")).text
            assert 'tidemill_engine_up{model_name=""} 0.0' in metrics
            for stream in (False, True):
                body = {"prompt": "a", "stream": stream}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_not_up"
            with pytest.raises(Unavailable) as caught:
                await text.generate("a")
            assert caught.value.retry_after_ms == 1000
            await until(lambda: pauses.count(0.123) >= 4)
            assert not {0.246, 0.492} & set(pauses)
            async with serving(fake, port):
                await until(lambda: frontend.desk.state == "ready")
                assert (await client.post("/v1/completions", json={"prompt": "a"})).is_success
                assert (await client.get("/health")).status_code == 200
                assert (await text.generate("ab")).text == "ab" * 8
                metrics = (await client.get("/metrics")).text
                ups = [one for one in metrics.splitlines() if one.startswith("tidemill_engine_up")]
                assert ups == ['tidemill_engine_up{model_name="fake"} 1.0'], "nobody is missing"


async def test_an_engine_killed_in_the_middle(tmp_path: Path) -> None:
    fake, _ = make_engine(tmp_path, step_s=0.02)
    port = free_port()
    async with frontend_for(port) as frontend:
        url = f"http://127.0.0.1:{frontend.http_port}"
        async with http_client(url) as client:
            body = {"prompt": "ab", "max_tokens": 400}
            async with serving(fake, port):
                await until(lambda: frontend.desk.state == "ready")
                whole = asyncio.create_task(client.post("/v1/completions", json=body))
                asked = client.build_request(
                    "POST", "/v1/completions", json=body | {"stream": True}
                )
                answer = await client.send(asked, stream=True)
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                await until(lambda: fake.live == 2)
            events = [line async for line in lines if line]
            assert answer.status_code == 200
            assert events[-1] == "data: [DONE]"
            error = json.loads(events[-2].removeprefix("data: "))["error"]
            assert error["code"] == "engine_dead"
            answer = await whole
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            await until(lambda: frontend.desk.num_live == 0)
            fake.instance_id = "fake-2"
            async with serving(fake, port):
                await until(lambda: frontend.desk.state == "ready")
                assert (await client.post("/v1/completions", json={"prompt": "a"})).is_success


@pytest.mark.parametrize("same_process", [True, False])
async def test_only_the_same_engine_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_process: bool
) -> None:
    """Before the first token a request survives a lost session, but not a lost engine."""
    monkeypatch.setattr("frontend.fleet.route._WAIT_S", PATIENCE_S)
    fake, _ = make_engine(tmp_path, hold=True)
    port = free_port()
    async with frontend_for(port) as frontend, serving(fake, port):
        await until(lambda: frontend.desk.state == "ready")
        async with AsyncClient(f"127.0.0.1:{frontend.grpc_port}") as client:
            asked = asyncio.create_task(client.generate("ab", SamplingParams(max_tokens=3)))
            await until(lambda: fake.live == 1)
            fake.instance_id = "fake-1" if same_process else "fake-2"
            fake.drop_sessions()
            if same_process:
                await until(lambda: len(fake.submits) == 2)
                fake.hold = False
                assert (await asked).text == "aba"
            else:
                with pytest.raises(Unavailable) as caught:
                    await asked
                assert caught.value.reason == "ENGINE_DEAD"
                assert len(fake.submits) == 1


async def test_a_draining_engine_takes_no_new_requests(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        await served.engine.say(pb.SessionResponse(draining=pb.Draining(deadline_ms=1000)))
        await until(lambda: served.frontend.desk.state == "draining")
        async with served.http() as client:
            answer = await client.post("/v1/completions", json={"prompt": "a"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining"


@pytest.mark.parametrize("phase", ["before the first token", "while streaming", "not streaming"])
@pytest.mark.parametrize("face", ["http", "grpc"])
async def test_a_client_that_leaves_stops_the_engine(tmp_path: Path, phase: str, face: str) -> None:
    engine = {"hold": phase == "before the first token", "step_s": 0.01}
    async with stack(tmp_path, engine=engine) as served:
        params = {"prompt": "ab", "max_tokens": 450, "stream": phase != "not streaming"}
        async with (
            served.http() as http,
            AsyncClient(served.grpc_address) as text,
        ):
            chosen = SamplingParams(max_tokens=450)
            if face == "http":
                work = http.post("/v1/completions", json=params)
            elif phase == "not streaming":
                work = text.generate("ab", chosen)
            else:
                work = consume(text.generate_stream("ab", chosen))
            task = asyncio.create_task(work)
            await until(lambda: served.engine.live == 1)
            if phase == "while streaming":
                await until(lambda: served.engine.sent >= 10)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await until(lambda: served.engine.live == 0)
        assert served.engine.outcomes == ["aborted"]
        await until(lambda: served.frontend.desk.num_live == 0)


async def consume(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_a_reader_that_is_too_slow_loses_only_its_own_request(tmp_path: Path) -> None:
    """What one client does not read is bounded; the engine stops, the others go on."""
    engine = {"max_model_len": 1 << 24, "tokens_per_step": 4000}
    async with stack(tmp_path, engine=engine) as served:
        body = json.dumps({"prompt": "tide" * 50, "max_tokens": 1 << 23, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        port = served.frontend.http_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write((head + body).encode())
        assert b"200" in await reader.readline()
        await until(lambda: served.engine.outcomes == ["aborted"])
        async with AsyncClient(served.grpc_address) as client:
            assert (await client.generate("ab", SamplingParams(max_tokens=3))).text == "aba"
        assert served.frontend.desk.fleet.num_slots == 0
        text = b""
        while chunk := await reader.read(1 << 20):
            text = (text + chunk)[-4000:]
            if b"[DONE]" in text:
                break
        assert b"slow_reader" in text
        writer.close()
        await writer.wait_closed()


async def test_draining_lets_running_requests_finish(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, engine={"hold_after": 10}) as served,
        served.http() as client,
    ):
        body = {"prompt": "ab", "max_tokens": 60}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: served.engine.live == 1)
        drained = asyncio.create_task(served.frontend.drain())
        async with AsyncClient(served.grpc_address) as text:
            reason = ""
            while not reason:
                try:
                    await text.generate("ab", SamplingParams(max_tokens=1))
                except Unavailable as refused:
                    reason = refused.reason
        assert reason == "DRAINING"
        with pytest.raises(httpx.ConnectError):
            await client.post("/v1/completions", json=body)
        assert not drained.done()
        served.engine.hold_after = None
        assert (await running).json()["usage"]["completion_tokens"] == 60
        await asyncio.wait_for(drained, PATIENCE_S)


async def test_what_outlives_a_drain_hears_so_behind_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over both faces, with and without a token: UNAVAILABLE, and where to go."""
    monkeypatch.setattr("frontend.app._CLOSING_S", PATIENCE_S)  # what takes longer is cut off
    async with stack(tmp_path, engine={"hold_after": 3}, drain_timeout_s=0.2) as served:
        body = {"prompt": "ab", "max_tokens": 60}
        async with served.http() as http, AsyncClient(served.grpc_address) as text:
            whole = asyncio.create_task(http.post("/v1/completions", json=body))
            asked = http.build_request("POST", "/v1/completions", json=body | {"stream": True})
            answer = await http.send(asked, stream=True)
            stream = text.generate_stream("ab", SamplingParams(max_tokens=60))
            assert (await anext(stream)).text
            await until(lambda: served.engine.live == 3)
            await served.frontend.drain()
            stopping = asyncio.create_task(served.frontend.stop())
            events = [line async for line in answer.aiter_lines() if line]
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "drain_timeout"
            assert events[-1] == "data: [DONE]"
            assert (await whole).status_code == 503
            assert (await whole).headers["retry-after"] == "1"
            with pytest.raises(Unavailable, match="send the request to another one") as caught:
                await consume(stream)
            assert caught.value.retry_after_ms == 1000
            await stopping
        await until(lambda: served.engine.live == 0)


async def test_a_busy_port_is_named_with_its_flag(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag in ("http_port", "grpc_port"):
            config = FrontendConfig(**{"http_port": 0, "grpc_port": 0, flag: port})
            with pytest.raises(FailedPrecondition, match=f"{port}.*--{flag.replace('_', '-')}"):
                await FrontendServer.start(config)
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "frontend", "--http-port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert f"{port}" in done.stderr
    assert "--http-port" in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_process_serves_without_torch_and_drains_on_sigterm(tmp_path: Path) -> None:
    fake, _ = make_engine(tmp_path, step_s=0.02)
    http_port, grpc_port = free_port(), free_port()
    code = (
        "import sys, atexit; from frontend.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "print('torch' in sys.modules, status)"
    )
    async with serving(fake) as port:
        flags = ["--engine", f"127.0.0.1:{port}", "--http-port", str(http_port)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, *flags, "--grpc-port", str(grpc_port),
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONWARNINGS": "default"},
        )  # fmt: skip
        async with http_client(f"http://127.0.0.1:{http_port}") as client:
            await until_healthy(client)
            messages = [{"role": "user", "content": "hello"}]
            body = {"messages": messages, "max_tokens": 30}
            running = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await until(lambda: fake.live == 1)
            process.send_signal(signal.SIGTERM)
            assert (await running).json()["usage"]["completion_tokens"] == 30
        output, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert output.decode().split() == ["False", "0"], errors.decode()
    assert b"Traceback" not in errors, errors.decode()
    lines = [json.loads(line) for line in errors.decode().splitlines() if line.startswith("{")]
    (finished,) = [line for line in lines if line["message"] == "request finished"]
    assert finished["completion_tokens"] == 30
    assert finished["ttft_s"] > 0


async def until_healthy(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(3 * PATIENCE_S):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def test_grpc_health_and_reflection(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, reflection=True) as served,
        grpc.aio.insecure_channel(served.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest
        watch = stub.Watch(ask(service="readiness"))
        while (await watch.read()).status != 1:
            pass
        for name in ("", "liveness", "readiness", "tidemill.v1.TextService"):
            async with asyncio.timeout(PATIENCE_S):
                while (await stub.Check(ask(service=name))).status != 1:
                    pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(ask(service="nothing"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await served.frontend.drain()
        assert (await watch.read()).status == 2
        assert (await stub.Check(ask(service="liveness"))).status == 1
        watch.cancel()


async def test_many_streams_at_once(tmp_path: Path) -> None:
    async with stack(tmp_path, engine={"step_s": 0.005}) as served:
        limits = httpx.Limits(max_connections=None)
        async with http_client(served.url, limits=limits) as client:
            body = {"prompt": "tide", "max_tokens": 64, "stream": True}

            async def one() -> None:
                answer = await client.post("/v1/completions", json=body)
                chunks = [json.loads(e[6:]) for e in answer.text.split("\n\n")[:-2]]
                assert "".join(c["choices"][0]["text"] for c in chunks) == "tide" * 16

            await asyncio.gather(*(one() for _ in range(64)))
        assert served.engine.live == 0
