"""The whole stack as an operator runs it: engine, rank and frontend as processes of their own.

It does not know what is asked of them.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.service.engine_fixtures import Client as SessionClient
from tests.service.engine_fixtures import session
from tests.waiting import PATIENCE_S, eventually, free_port, http_client
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import engine_pb2, engine_pb2_grpc, text_pb2, text_pb2_grpc

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
START_S = 180.0
"""Three interpreters load torch and gRPC, on a machine that may be doing so for others too."""
LONG_TEXT = {
    "prompt": {"text": "a"},
    "options": {"sampling": {"max_tokens": 2000}, "ignore_eos": True},
}
ASKED = {"prompt": "a"}
SLACK_HANDLES = 2  # a connection that is being closed by the other side


class Service:
    """One `tidemill` process; its output is kept in a file."""

    def __init__(self, folder: Path, verb: str, *argv: str, **environ: str) -> None:
        self._log = folder / f"{verb}-{time.monotonic_ns()}.log"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidemill", verb, *argv],
                env={**os.environ, "PYTHONPATH": path, **environ},
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def rank_pid(self) -> int:
        """Of an engine: its only child."""
        (text,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(text)

    def wait(self, seconds: float = START_S) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_S)
        self.process.kill()
        self.process.wait()


@contextmanager
def running(folder: Path, verb: str, *argv: str) -> Iterator[Service]:
    service = Service(folder, verb, *argv)
    try:
        yield service
    finally:
        service.end()


def engine(folder: Path, port: int, *argv: str) -> Any:
    """`tidemill engine` on `port`."""
    flags = (f"--engine-port={port}", "--max-rows=4", "--num-pages=1024", "--drain-timeout-s=1")
    return running(folder, "engine", *argv, *flags)


@contextmanager
def frontend(folder: Path, engine_port: int, *argv: str) -> Iterator[Stack]:
    """`tidemill frontend` on free ports, listening; its engine may be away."""
    stack = Stack(engine_port, free_port(), free_port())
    flags = (f"--http-port={stack.http_port}", f"--grpc-port={stack.grpc_port}")
    with running(
        folder, "frontend", f"--engine={HOST}:{engine_port}", "--drain-timeout-s=1", *flags, *argv
    ) as service:
        stack.services["frontend"] = service.pid
        eventually(lambda: "listening" in service.log, "the frontend does not start", START_S)
        yield stack


@contextmanager
def serving(folder: Path, model: str) -> Iterator[Stack]:
    """Both for a model, ready."""
    port = free_port()
    with engine(folder, port, model) as served, frontend(folder, port) as stack:
        stack.wait_ready()
        stack.services |= {"engine": served.pid, "rank": served.rank_pid}
        yield stack


@asynccontextmanager
async def left_idle(stack: Stack) -> AsyncIterator[Faces]:
    """Its faces; checks at the end that nothing is left over."""
    async with connected(stack) as faces:
        yield faces
        await until_idle(faces)


class Stack:
    """Where a running stack listens, and what an observer can count in it."""

    def __init__(self, port: int, http_port: int, grpc_port: int) -> None:
        self.port = port
        self.http_port = http_port
        self.grpc_port = grpc_port
        self.services: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http_port}"

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=PATIENCE_S).json())

    def wait_ready(self) -> None:
        """Until the frontend takes requests."""
        eventually(lambda: self.health()["status"] == "healthy", "the stack is not ready", START_S)

    def num_handles(self) -> dict[str, int]:
        """Open files of each process: sockets, pipes, temporary files."""
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self.services.items()}


@dataclass
class Faces:
    """One connection to each face of a stack, for one test."""

    stack: Stack
    http: httpx.AsyncClient
    text: Any
    engine: Any
    info: Any
    text_channel: grpc.aio.Channel
    engine_channel: grpc.aio.Channel
    session: SessionClient

    async def state(self) -> engine_pb2.WatchStateResponse:
        """The engine's snapshot of this moment."""
        call = self.info.WatchState(engine_pb2.WatchStateRequest())
        try:
            return await call.read()
        finally:
            call.cancel()

    async def count(self, name: str) -> int:
        """An engine counter out of `finished: length=3 deadline=1`."""
        words = (await self.state()).detail.split()
        return next((int(w.partition("=")[2]) for w in words if w.startswith(f"{name}=")), 0)

    async def busy(self) -> tuple[int, int, int, int]:
        """What is being worked on: (running, waiting, pages used, requests in the frontend)."""
        load, health = (await self.state()).load, await self.http.get("/health")
        return load.running, load.waiting, load.pages_used, health.json()["requests"]

    async def until_busy(self, wanted: Any, seconds: float = PATIENCE_S) -> None:
        """Waits until `wanted(running, waiting, pages, requests)`."""
        deadline = time.monotonic() + seconds
        while not wanted(*(now := await self.busy())):
            assert time.monotonic() < deadline, f"still {now}"
            await asyncio.sleep(0.05)


@asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[Faces]:
    """Fresh connections, of this test alone."""
    own = [*channel_options(64 << 20), ("grpc.use_local_subchannel_pool", 1)]
    async with (
        http_client(stack.url) as http,
        grpc.aio.insecure_channel(f"{HOST}:{stack.grpc_port}", own) as text,
        grpc.aio.insecure_channel(f"{HOST}:{stack.port}", own) as engine,
    ):
        service = engine_pb2_grpc.EngineServiceStub(engine)
        async with session(service) as open_session:
            yield Faces(
                stack=stack,
                http=http,
                text=text_pb2_grpc.TextServiceStub(text),
                engine=service,
                info=engine_pb2_grpc.EngineInfoServiceStub(engine),
                text_channel=text,
                engine_channel=engine,
                session=open_session,
            )


async def good(faces: Faces) -> None:
    """An ordinary request on every open connection; greedy, for the default temperature of 1 draws
    something else than the other face once in 20,000 times, as it should."""
    asked = {"prompt": "add: 1+2 =", "max_tokens": 2, "temperature": 0}
    answer = await faces.http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    prompt = {"text": "add: 1+2 ="}
    sampling = engine_pb2.SamplingParams(max_tokens=2, temperature=0)
    request = text_pb2.TextServiceGenerateRequest(prompt=prompt, options={"sampling": sampling})
    text = (await faces.text.Generate(request)).choices[0].text
    assert text == answer.json()["choices"][0]["text"] != ""
    await faces.session.submit(1 << 40, 5, 6, 7, max_tokens=2)
    await faces.session.drain(1 << 40)
    assert len(faces.session.tokens[1 << 40]) in (1, 2)


async def until_idle(faces: Faces) -> None:
    """Waits until nothing runs, waits or holds a page anywhere."""
    await faces.until_busy(lambda *now: now == (0, 0, 0, 0))


@asynccontextmanager
async def settled(stack: Stack) -> AsyncIterator[None]:
    """What was opened inside is closed again at the end, in every process."""
    before = stack.num_handles()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while any(now > before[name] + SLACK_HANDLES for name, now in stack.num_handles().items()):
        assert time.monotonic() < deadline, f"open files: {before}, now {stack.num_handles()}"
        await asyncio.sleep(0.02)


def text_call(stub: Any, method: str, **options: Any) -> Any:
    """A request for 2,000 tokens to `Generate` or `GenerateStream`."""
    kinds = {
        "Generate": text_pb2.TextServiceGenerateRequest,
        "GenerateStream": text_pb2.GenerateStreamRequest,
    }
    return getattr(stub, method)(kinds[method](**LONG_TEXT), **options)


async def check_away(stack: Stack, words: str) -> None:
    """What clients hear while there is no engine; probes see a live frontend that is not ready."""
    async with http_client(stack.url) as client:
        # An engine that is on its way out may answer once more, in other words.
        async with asyncio.timeout(PATIENCE_S):
            while not re.search(  # noqa: ASYNC110 (in another process)
                words, (await client.post("/v1/completions", json=ASKED)).text
            ):
                await asyncio.sleep(0.05)
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in (("completions", ASKED), ("chat/completions", chat)):
            answer = await client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("unavailable_error", "engine_not_up")
            assert re.search(words, error["message"]), error
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 503
    async with grpc.aio.insecure_channel(f"{HOST}:{stack.grpc_port}") as channel:
        call = text_call(text_pb2_grpc.TextServiceStub(channel), "Generate")
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert re.search(words, await call.details())


def is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent may not have heard of it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
