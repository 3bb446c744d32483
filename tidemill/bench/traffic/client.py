"""A client process: asks what is due, when it is due, and keeps what it saw.

An open loop begins every request at its time, whether or not earlier ones are answered; a closed
loop keeps a number of requests open. It does not know protocols or figures.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import uvloop

from tidemill.bench.traffic.answer import CONNECTION, TIMEOUT, Answer
from tidemill.bench.traffic.asked import Source
from tidemill.bench.traffic.grpc_face import GrpcFace
from tidemill.bench.traffic.http_face import HttpFace
from tidemill.bench.traffic.target import Face, Target

_TELL_EVERY_S = 0.25
_SAID_CHARS = 300
_REST_S = 0.1
"""Of a stream of a closed loop whose request failed: a server that refuses is not flooded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One process's part of a run. `numbers` name its requests to the source.

    Open loop: number i begins `starts[i]` seconds after the beginning. Closed loop (`streams`
    above 0): so many at a time until `until_s`, with numbers from `first` on, `stride` apart.
    """

    target: Target
    source: Source
    starts: Sequence[float] = ()
    numbers: Sequence[int] = ()
    streams: int = 0
    first: int = 0
    stride: int = 1
    until_s: float = 0.0


class Told(NamedTuple):
    """How far a process is."""

    begun: int
    ended: int
    failed: int


class Outcome(NamedTuple):
    """What a process saw, and how busy it was."""

    answers: list[Answer]
    cpu_share: float


def run_client(share: Share, pipe: Connection) -> None:
    """The process: says None when it can begin, hears when to, tells, and ends with its Outcome."""
    gc.disable()  # a collection would look like a late token
    pipe.send(uvloop.run(_Client(share).run(pipe)))


class _Client:
    def __init__(self, share: Share) -> None:
        self._share = share
        self._faces: list[Face] = []
        self._answers: list[Answer] = []
        self._begun = self._failed = 0
        self._turn = itertools.count(share.first)

    async def run(self, pipe: Connection) -> Outcome:
        share = self._share
        make: Callable[[Target, str], Face] = GrpcFace if share.target.is_grpc else HttpFace
        self._faces = [make(share.target, url) for url in share.target.urls]
        pipe.send(None)
        began: float = pipe.recv()
        cpu_s, since = time.process_time(), time.monotonic()
        telling = asyncio.create_task(self._tell(pipe))
        await (self._closed(began) if share.streams else self._open(began))
        cpu_s, spent = time.process_time() - cpu_s, time.monotonic() - since
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        for face in self._faces:
            await face.close()
        return Outcome(self._answers, cpu_s / spent)

    async def _open(self, began: float) -> None:
        async with asyncio.TaskGroup() as group:
            for number, start in zip(self._share.numbers, self._share.starts, strict=True):
                asked = self._contents(number)
                await asyncio.sleep(max(0.0, began + start - time.monotonic()))
                group.create_task(self._one(asked, began + start))

    async def _closed(self, began: float) -> None:
        share = self._share
        numbers = itertools.count(share.first, share.stride)
        await asyncio.sleep(max(0.0, began - time.monotonic()))

        async def keep_busy() -> None:
            while time.monotonic() < began + share.until_s:
                asked = self._contents(next(numbers))
                if not await self._one(asked, time.monotonic()):
                    await asyncio.sleep(_REST_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(share.streams):
                group.create_task(keep_busy())

    def _contents(self, number: int) -> Any:
        """All faces write a request in the same way."""
        return self._faces[0].write(self._share.source.take(number))

    async def _one(self, content: Any, due: float) -> bool:
        """Whether it was answered."""
        answer = Answer(due, begun=time.monotonic())
        self._begun += 1
        limit_s = self._share.target.timeout_s
        left = due + limit_s - answer.begun
        try:
            async with asyncio.timeout(left):
                await self._ask(content, answer)
        except TimeoutError:
            answer.status, answer.said = TIMEOUT, f"no end within {limit_s:g} s"
            answer.output_tokens = answer.output_tokens or len(answer.chunks)
        except OSError as failure:
            answer.status, answer.said = CONNECTION, str(failure)[:_SAID_CHARS]
        answer.ended = answer.ended or time.monotonic()
        self._failed += not answer.is_ok
        self._answers.append(answer)
        return answer.is_ok

    async def _ask(self, content: Any, answer: Answer) -> None:
        """The addresses in turn; one that refuses the connection is replaced once, by the next."""
        turn = next(self._turn)
        try:
            await self._faces[turn % len(self._faces)].ask(content, answer)
        except OSError:
            if len(self._faces) == 1:
                raise
            answer.was_moved = True
            await self._faces[(turn + 1) % len(self._faces)].ask(content, answer)

    async def _tell(self, pipe: Connection) -> None:
        while True:
            pipe.send(Told(self._begun, len(self._answers), self._failed))
            await asyncio.sleep(_TELL_EVERY_S)


def shares(whole: Share, count: int) -> Iterator[Share]:
    """The same work for `count` processes: requests are dealt out in turn, so that together they
    begin exactly when they would in one."""
    for number in range(count):
        yield Share(
            target=whole.target,
            source=whole.source,
            starts=whole.starts[number::count],
            numbers=whole.numbers[number::count],
            streams=len(range(number, whole.streams, count)),
            first=number,
            stride=count,
            until_s=whole.until_s,
        )
