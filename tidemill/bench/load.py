"""A load generator for whole answers and streams over HTTP/1.1 and gRPC, in processes of its own.

It must not be what is measured: while answers arrive it keeps bytes and times, and reads them when
the run is over. It does not know what is served.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any, Protocol

import uvloop

from tidemill.bench.clock import since_ms, stamps
from tidemill.bench.wire import Arrivals, GrpcConnection, HttpConnection

_GRPC_CONNECTIONS = 8
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one client process asks of one port.

    `contents` are whole requests; `content[i]` is answered with `lengths[i]` tokens. `rate` is in
    requests per second, each sent when it is due; None: `concurrency` requests at any time.
    """

    port: int
    path: str
    """Of the gRPC method; empty: HTTP/1.1."""
    contents: Sequence[bytes]
    lengths: Sequence[int]
    concurrency: int
    rate: float | None
    warm_up_s: float
    seconds: float


@dataclass(slots=True)
class Seen:
    """What clients saw of answers and tokens that arrived in the window; times in milliseconds."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    requests: int = 0
    tokens: int = 0
    chunks: int = 0
    """Arrivals that brought tokens."""
    late_ms: list[float] = field(default_factory=list)
    """From the step that sent a token to its arrival, one per token but the first of an answer."""
    added_ms: list[float] = field(default_factory=list)
    """One per answer: from when its request was due to its end, without the engine's own time."""

    def add(self, other: Seen) -> None:
        """What another client process saw beside this one."""
        self.seconds = max(self.seconds, other.seconds)
        self.cpu_s = max(self.cpu_s, other.cpu_s)
        self.requests += other.requests
        self.tokens += other.tokens
        self.chunks += other.chunks
        self.late_ms += other.late_ms
        self.added_ms += other.added_ms


def generate_load(plans: Sequence[Plan], on_window: Any) -> Seen:
    """Runs every plan in a process of its own, all at once, and joins what they saw.

    `on_window` is called when the measured window begins and when it has ended. Raises RuntimeError
    when a client failed, for one because an answer had not its number of tokens.
    """
    context = multiprocessing.get_context("spawn")
    clients = []
    try:
        for plan in plans:
            ours, theirs = context.Pipe()
            client = context.Process(target=_client, args=(plan, theirs))
            client.start()
            theirs.close()
            clients.append((client, ours))
        for _ in range(2):  # began, ended
            for _, pipe in clients:
                _heard(pipe)
            on_window()
        whole = Seen()
        for _, pipe in clients:
            whole.add(_heard(pipe))
        return whole
    finally:
        for client, pipe in clients:
            pipe.close()
            client.terminate()
            client.join()


class Asker(Protocol):
    """A connection, or a place on one."""

    async def ask(self, content: bytes) -> Arrivals: ...


@dataclass(slots=True)
class _Answer:
    due: float
    length: int
    arrivals: Arrivals


class _Run:
    """One plan at work."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._number = itertools.count()
        self._answers: list[_Answer] = []
        self._is_over = False

    async def run(self, pipe: Pipe) -> Seen:
        """Connects, warms up, measures."""
        plan = self._plan
        askers = await self._connect()
        busy = asyncio.create_task(self._paced(askers) if plan.rate else self._steady(askers))
        await self._wait(busy, plan.warm_up_s)
        pipe.send(None)
        began, cpu_s = time.monotonic(), time.process_time()
        await self._wait(busy, plan.seconds)
        seen = Seen(seconds=time.monotonic() - began, cpu_s=time.process_time() - cpu_s)
        pipe.send(None)
        self._is_over = True
        await busy  # what is open is read to its end, for the tokens that came in the window
        self._read(seen, began, began + seen.seconds)
        return seen

    @staticmethod
    async def _wait(busy: asyncio.Task[None], seconds: float) -> None:
        done, _ = await asyncio.wait({busy}, timeout=seconds)
        if done:
            busy.result()
            raise RuntimeError("the load ended before its time")

    async def _connect(self) -> list[Asker]:
        plan, loop = self._plan, asyncio.get_running_loop()
        count = min(_GRPC_CONNECTIONS, plan.concurrency) if plan.path else plan.concurrency

        def make() -> asyncio.Protocol:
            return GrpcConnection(plan.path) if plan.path else HttpConnection()

        made: list[Any] = [
            (await loop.create_connection(make, "127.0.0.1", plan.port))[1] for _ in range(count)
        ]
        return list(itertools.islice(itertools.cycle(made), plan.concurrency))

    async def _one(self, asker: Asker, due: float) -> None:
        number = next(self._number)
        content, length = (
            self._plan.contents[number % len(self._plan.contents)],
            self._plan.lengths[number % len(self._plan.lengths)],
        )
        async with asyncio.timeout(_PATIENCE_S):
            arrivals = await asker.ask(content)
        self._answers.append(_Answer(due, length, arrivals))

    async def _steady(self, askers: list[Asker]) -> None:
        async def keep_busy(asker: Asker) -> None:
            while not self._is_over:
                await self._one(asker, time.monotonic())

        async with asyncio.TaskGroup() as group:
            for asker in askers:
                group.create_task(keep_busy(asker))

    async def _paced(self, askers: list[Asker]) -> None:
        """Each request when it is due, or as soon as a connection is free; it was due all the
        same, so waiting for a connection counts."""
        assert self._plan.rate is not None, "paced without a rate"
        # In turn: a server closes connections that nobody uses for some seconds.
        free: asyncio.Queue[Asker] = asyncio.Queue()
        for asker in askers:
            free.put_nowait(asker)

        async def one(asker: Asker, due: float) -> None:
            await self._one(asker, due)
            free.put_nowait(asker)

        async with asyncio.TaskGroup() as group:
            for due in _times(1 / self._plan.rate):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if self._is_over:
                    return
                group.create_task(one(await free.get(), due))

    def _read(self, seen: Seen, began: float, ended: float) -> None:
        for answer in self._answers:
            found = stamps(answer.arrivals)
            if len(found) != answer.length:
                said = b"".join(chunk for _, chunk in answer.arrivals)[:500]
                raise RuntimeError(f"{len(found)} tokens instead of {answer.length}: {said!r}")
            inside = [one for one in found[1:] if began <= one[0] < ended]
            seen.tokens += sum(began <= when < ended for when, _ in found)
            seen.chunks += len({when for when, _ in inside})
            seen.late_ms += [since_ms(stamp, when) for when, stamp in inside]
            (_, submitted), (when, last) = found[0], found[-1]
            if began <= when < ended:
                seen.requests += 1
            if began <= answer.due and when < ended:  # not those that all began at once
                seen.added_ms.append(since_ms(last, when) - since_ms(submitted, answer.due))


def _times(every_s: float) -> Iterator[float]:
    began = time.monotonic()
    return (began + number * every_s for number in itertools.count())


def _client(plan: Plan, pipe: Pipe) -> None:
    gc.disable()  # a collection would look like a late token
    pipe.send(uvloop.run(_Run(plan).run(pipe)))


def _heard(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a client process failed; its reason is above") from None
