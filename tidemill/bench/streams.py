"""A load generator for streamed completions: many HTTP connections in processes of their own.

It must not be what is measured, so it parses nothing while tokens arrive: it counts the chunks that
hold text, takes the time, and reads the usage of each request at its end. It does not know engines.
"""

from __future__ import annotations

import array
import asyncio
import gc
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import orjson
import uvloop

_TEXT = b'"text":'
"""Stands once in every event that holds tokens, and cannot stand in a JSON string."""
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_KEPT_BYTES = 4096
"""How much of the end of a stream is kept: the usage is in it."""
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_HOST = "127.0.0.1"


class Request(NamedTuple):
    """A completion of exactly `max_tokens` tokens."""

    prompt: list[int]
    max_tokens: int
    temperature: float

    def as_http(self) -> bytes:
        """The whole HTTP request."""
        body = orjson.dumps(
            {
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {_HOST}\r\ncontent-length: {len(body)}\r\n"
        return f"{head}content-type: application/json\r\n\r\n".encode() + body


@dataclass(slots=True)
class Observed:
    """What clients saw of one run. Times are seconds; `began` and `ended` are CLOCK_MONOTONIC."""

    began: float
    ended: float
    cpu_s: float
    tokens: int = 0
    """As the server counts them, over all requests."""
    events: int = 0
    """Chunks with text: fewer than tokens where the server put several into one."""
    first_s: list[float] = field(default_factory=list)
    """From sending a request to its first text, one per request."""
    gap_s: list[float] = field(default_factory=list)
    """Between two arrivals of text on one stream."""


def joined(parts: Sequence[Observed]) -> Observed:
    """What several client processes saw, as one."""
    whole = Observed(
        began=min(part.began for part in parts),
        ended=max(part.ended for part in parts),
        cpu_s=max(part.cpu_s for part in parts),
    )
    for part in parts:
        whole.tokens += part.tokens
        whole.events += part.events
        whole.first_s += part.first_s
        whole.gap_s += part.gap_s
    return whole


class Stream(asyncio.Protocol):
    """One connection, kept alive: a request at a time, its arrivals written to `seen`."""

    def __init__(self, seen: Observed) -> None:
        self._seen = seen
        self._transport: asyncio.WriteTransport | None = None
        self._done: asyncio.Future[None] | None = None
        self._end = b""
        self._sent = 0.0
        self._arrivals = array.array("d")

    async def ask(self, request: Request, content: bytes) -> None:
        """Returns when the answer is complete; raises RuntimeError for any other answer."""
        assert self._transport is not None, "not connected"
        self._done = asyncio.get_running_loop().create_future()
        self._end, self._arrivals = b"", array.array("d")
        self._sent = time.monotonic()
        self._transport.write(content)
        await self._done
        usage = _USAGE.search(self._end)
        if usage is None or int(usage[1]) != request.max_tokens:
            raise RuntimeError(f"not {request.max_tokens} tokens: {self._end!r}")
        self._take_down(request.max_tokens)

    def _take_down(self, num_tokens: int) -> None:
        seen, times = self._seen, self._arrivals
        seen.tokens += num_tokens
        seen.first_s.append(times[0] - self._sent)
        seen.gap_s += [then - before for before, then in pairwise(times)]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, chunk: bytes) -> None:
        begun = self._end[1 - len(_TEXT) :]  # a mark may be cut in two
        if count := (begun + chunk).count(_TEXT):
            self._seen.events += count
            self._arrivals.append(time.monotonic())
        self._end = (self._end + chunk)[-_KEPT_BYTES:]
        if self._end.endswith(_END) or not self._arrivals:
            self._check_end()

    def _check_end(self) -> None:
        """Before the first text there is the head of the answer, which may be a refusal."""
        assert self._done is not None, "an answer without a request"
        is_over = self._end.endswith(_END) or not self._end.startswith(b"HTTP/1.1 200")
        if is_over and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, failure: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(f"the connection was lost: {failure}"))


async def observe(
    port: int, requests: Sequence[Request], num_streams: int, gate: Connection
) -> Observed:
    """Keeps `num_streams` connections busy until all requests are answered.

    Connects first, then says so through `gate` and waits for the word to begin.
    """
    seen = Observed(began=0.0, ended=0.0, cpu_s=0.0)
    loop = asyncio.get_running_loop()
    waiting = iter([(request, request.as_http()) for request in requests])
    made = [
        await loop.create_connection(lambda: Stream(seen), _HOST, port) for _ in range(num_streams)
    ]
    gate.send(None)
    gate.recv()

    async def serve(stream: Stream) -> None:
        for request, content in waiting:
            await stream.ask(request, content)

    cpu_s, seen.began = time.process_time(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _, stream in made:
            group.create_task(serve(stream))
    seen.ended, seen.cpu_s = time.monotonic(), time.process_time() - cpu_s
    for transport, _ in made:
        transport.close()
    return seen


def stream_all(
    ports: Sequence[int],
    requests: Sequence[Request],
    concurrency: int,
    *,
    on_begin: Callable[[], None],
) -> Observed:
    """Streams all requests through the frontends at `ports`, dealt out in turn.

    One client process per frontend, `concurrency` streams in all. `on_begin` is called when all
    are connected, just before the first request. Raises RuntimeError when a client failed.
    """
    context = multiprocessing.get_context("spawn")
    clients = []
    for number, port in enumerate(ports):
        own = requests[number :: len(ports)]
        num_streams = min(len(own), len(range(number, concurrency, len(ports))))
        gate, theirs = context.Pipe()
        client = context.Process(target=_client, args=(port, own, num_streams, theirs))
        client.start()
        theirs.close()
        clients.append((client, gate))
    try:
        for _, gate in clients:
            _heard(gate)
        on_begin()
        for _, gate in clients:
            gate.send(None)
        return joined([_heard(gate) for _, gate in clients])
    finally:
        for client, gate in clients:
            gate.close()
            client.terminate()
            client.join()


def _client(port: int, requests: Sequence[Request], num_streams: int, gate: Connection) -> None:
    gc.disable()  # a collection would look like a late token
    gate.send(uvloop.run(observe(port, requests, num_streams, gate)))


def _heard(gate: Connection) -> Any:
    try:
        return gate.recv()
    except EOFError:
        raise RuntimeError("a client process failed; its reason is above") from None
