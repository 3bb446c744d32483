"""Real engines and frontends as processes, a wire between them that can be cut, and many streams
whose every token is known beforehand.

The engines simulate: their tokens depend on prompt and position alone, so whatever engine answers,
the answer is the same.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import struct
import time
from asyncio import trsock
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from engine_service.simulated import SimulatedExecutor, first_token_seed
from tests.e2e.real_stack import HOST, START_S, Service
from tests.service.engine_fixtures import pack
from tests.waiting import PATIENCE_S, free_port
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import text_pb2, text_pb2_grpc

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
"""Of Linux; Python names them from 3.14 on."""
ENGINE = ("demo", "--executor=simulated", "--num-pages=8192", "--log-level=warning")
VOCAB, EOS = 272, 257
"""Of demo."""


@dataclass
class Site:
    """Engines and frontends by port; a service that was killed can be started again."""

    folder: Path
    engine_flags: tuple[str, ...] = ()
    frontend_flags: tuple[str, ...] = ()
    services: dict[int, Service] = field(default_factory=dict)
    grpc_ports: dict[int, int] = field(default_factory=dict)
    """Of frontends, by their HTTP port."""

    def start_engine(self, port: int, engine: tuple[str, ...] = ENGINE) -> Service:
        flags = (*engine, f"--engine-port={port}", *self.engine_flags)
        return self._put(port, Service(self.folder, "engine", *flags))

    def start_frontend(self, port: int, *engines: int) -> Service:
        where = ",".join(f"{HOST}:{engine}" for engine in engines)
        text = self.grpc_ports.setdefault(port, free_port())
        flags = (f"--http-port={port}", f"--grpc-port={text}", f"--engine={where}")
        return self._put(port, Service(self.folder, "frontend", *flags, *self.frontend_flags))

    def _put(self, port: int, service: Service) -> Service:
        before = self.services.get(port)
        if before is not None:
            before.wait()
        self.services[port] = service
        return service

    def stop(self, port: int) -> None:
        """SIGTERM, and waits for the end."""
        service = self.services[port]
        service.process.send_signal(signal.SIGTERM)
        assert service.wait() == 0, service.log

    def kill(self, port: int) -> None:
        """SIGKILL, without waiting."""
        self.services[port].process.kill()

    async def states(self, frontend: int) -> dict[int, str]:
        """Of all engines, as a frontend sees them."""
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            answer = await client.get(f"http://{HOST}:{frontend}/health")
        told = answer.json()["engines"]
        return {int(one["address"].rpartition(":")[2]): one["state"] for one in told}

    async def until_states(self, frontend: int, seconds: float, **wanted: Any) -> float:
        """Waits until the engines of a frontend are as `wanted`; returns how long that took."""
        states = {int(port.removeprefix("p")): state for port, state in wanted.items()}
        began, now = time.monotonic(), {}
        while time.monotonic() - began < seconds:
            with suppress(httpx.TransportError):
                now = await self.states(frontend)
                if now.items() >= states.items():
                    return time.monotonic() - began
            await asyncio.sleep(0.05)
        raise AssertionError(f"wanted {states}, still {now} after {seconds} s")

    async def metric(self, frontend: int, name: str) -> float:
        """The sum of a metric's lines; `name` may go on with labels."""
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            text = (await client.get(f"http://{HOST}:{frontend}/metrics")).text
        lines = [one for one in text.splitlines() if one.startswith(name)]
        return sum(float(one.rpartition(" ")[2]) for one in lines)


@contextmanager
def site(folder: Path, **flags: tuple[str, ...]) -> Iterator[Site]:
    """Ends every process at the end, however it is."""
    made = Site(folder, **flags)
    try:
        yield made
    finally:
        for service in made.services.values():
            with suppress(ProcessLookupError):
                service.process.send_signal(signal.SIGCONT)
            service.process.kill()
            service.process.wait()


async def up(made: Site, frontend: int, *engines: int) -> None:
    """Until a frontend has a session with each of its engines."""
    await made.until_states(frontend, START_S, **{f"p{port}": "ready" for port in engines})


@dataclass
class Stream:
    """One request for tokens, as its client sees it, times by its clock."""

    prompt: tuple[int, ...]
    num: int
    tokens: list[int] = field(default_factory=list)
    code: grpc.StatusCode | None = None
    detail: str = ""
    ended: float = 0.0

    def check(self, whole: list[int]) -> None:
        """No wrong token, none twice, none left out; all of them unless it was cut."""
        assert self.tokens == whole[: len(self.tokens)], f"{self.prompt}: wrong tokens"
        if self.code is grpc.StatusCode.OK:
            assert len(self.tokens) == self.num, f"{self.prompt}: it ended early"


def prompts(count: int) -> list[tuple[int, ...]]:
    """Different ones."""
    return [(5 + number // 100, 5 + number % 100, 7) for number in range(count)]


class Client:
    """Streams over one connection to a frontend's gRPC face. `clock` says when they end."""

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        own = [*channel_options(64 << 20), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(f"{HOST}:{port}", own)
        self._stub = text_pb2_grpc.TextServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._channel.close()

    async def run(self, stream: Stream) -> Stream:
        """To its end, whatever that is."""
        options = text_pb2.TextOptions(ignore_eos=True, return_token_ids=True)
        options.sampling.max_tokens = stream.num
        request = text_pb2.GenerateStreamRequest(options=options)
        request.prompt.tokens.token_ids.extend(stream.prompt)
        call = self._stub.GenerateStream(request)
        try:
            async for answer in call:
                stream.tokens += answer.choice.token_ids
        except grpc.aio.AioRpcError as failure:
            stream.detail = failure.details() or ""
        stream.ended = self.clock()
        stream.code = await call.code()
        return stream


def right_answers(asked: list[tuple[int, ...]], num: int) -> list[list[int]]:
    """What the prompts are answered with, by whatever engine."""
    model = SimulatedExecutor(None, vocab_size=VOCAB, step_s=0, never=frozenset({EOS}))
    return [
        [model.token(first_token_seed(pack(*prompt), 0), len(prompt) + at) for at in range(num)]
        for prompt in asked
    ]


async def undisturbed(client: Client, asked: list[tuple[int, ...]], num: int) -> None:
    """All prompts are answered, and right."""
    streams = await asyncio.gather(*(client.run(Stream(prompt, num)) for prompt in asked))
    assert {one.code for one in streams} == {grpc.StatusCode.OK}, streams[0].detail
    assert [one.tokens for one in streams] == right_answers(asked, num)


def drop_packets(ends: Iterable[trsock.TransportSocket]) -> None:
    """The kernel drops every packet that comes for these sockets, unacknowledged (a BPF program of
    one instruction, `ret 0`)."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    for end in ends:
        if end.fileno() >= 0:
            attached = struct.pack("HL", 1, ctypes.addressof(program))
            end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)


class Wire:
    """A TCP way to a port that can be cut: packets are dropped, and nothing is closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: list[trsock.TransportSocket] = []
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._server is not None
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def cut(self) -> None:
        assert self._server is not None
        drop_packets([*self._server.sockets, *self._ends])

    def mend(self) -> None:
        """New connections pass; bytes of the old ones were lost for ever."""
        assert self._server is not None
        for pipe in self._pipes:
            pipe.cancel()
        for listener in self._server.sockets:
            listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, self._port)
        self._ends += [end.get_extra_info("socket") for end in (writer, back)]
        for pair in ((reader, back), (there, writer)):
            pipe = asyncio.create_task(self._pump(*pair))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            try:
                while chunk := await reader.read(1 << 16):
                    writer.write(chunk)
                    await writer.drain()
            finally:
                writer.close()
