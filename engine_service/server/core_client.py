"""The server's end of the pipe: commands in, step outputs out to the streams that own the rows.

It knows keys, routes and outlets; it does not know gRPC or protobuf.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from engine_service.core.control import Answer, Ask
from engine_service.core.journal import KvEvents
from engine_service.core.messages import (
    Abort,
    Command,
    Fatal,
    Finish,
    FinishReason,
    Progress,
    RankTrace,
    Ready,
    Reject,
    StepOutput,
    StepTrace,
    Submit,
    Tally,
)
from engine_service.pipe import Unframer, frame
from engine_service.server.asks import Asks
from engine_service.server.outlet import StepRows
from engine_service.server.shares import Ended, Group, Route, Sink, group, select
from engine_service.server.state import NO_LOAD
from tidemill.runtime.errors import EngineDead, InternalError, ServiceError

_REMEMBERED = 16_384  # request ids of ended requests that Abort still knows


class _Nobody:
    def step(self, rows: StepRows) -> None:
        """The stream that asked is gone."""

    def failed(self, handle: int, error: ServiceError) -> None:
        """The stream that asked is gone."""


_NOBODY = _Nobody()


class CoreListener(Protocol):
    """Who is told about the core's life."""

    def progressed(self, progress: Progress) -> None: ...

    def ready(self, ready: Ready) -> None: ...

    def stepped(self, trace: StepTrace | RankTrace) -> None: ...
    def kv_changed(self, told: KvEvents) -> None: ...

    def lost(self, error: EngineDead) -> None: ...


class CoreClient(asyncio.Protocol):
    """Routes every key from its Submit to its one terminal event, whatever happens in between."""

    def __init__(self, listener: CoreListener, *, post_mortem: Callable[[], str]) -> None:
        """`post_mortem` says how the core's process ended; asked once, when the pipe closes."""
        self._listener = listener
        self._post_mortem = post_mortem
        self._unframer = Unframer()
        self._transport: asyncio.Transport | None = None
        self._commands: list[Command] = []
        self.asks = Asks(self._send)
        self.holds: Callable[[Command], bool] = lambda command: False
        """Asked of every command: whether somebody else sends it on later."""
        self._keys = itertools.count(1)
        self._routes: dict[int, Route] = {}
        self._live_ids: dict[str, set[int]] = {}
        self._ended_ids: OrderedDict[str, None] = OrderedDict()
        self._split: tuple[list[int], list[Group]] = ([], [])
        self._last_words: Fatal | None = None
        self._heard_ns = time.monotonic_ns()
        self._idle = asyncio.Event()
        self._idle.set()
        self._beats = False
        self.load = NO_LOAD
        self.tally = Tally()
        self.finished: Counter[FinishReason | None] = Counter()  # None: refused before any step
        self.lost: EngineDead | None = None

    async def open(self, sock: socket.socket) -> None:
        """Starts to serve `sock`, which it owns from now on."""
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, sock)

    def tell(self, message: object) -> None:
        """Sends one message outside the batches: the configuration, first of all."""
        assert self._transport is not None, "the pipe is not open"
        self._transport.write(frame([message]))

    def submit(self, submit: Submit, sink: Sink, handle: int, *, ended: Ended) -> int:
        """Hands a sequence to the core under a new key; `submit.key` is ignored."""
        if self.lost is not None:
            raise self.lost
        key = next(self._keys)
        self._routes[key] = Route(sink, handle, submit.request_id, ended)
        self._live_ids.setdefault(submit.request_id, set()).add(key)
        self._idle.clear()
        self._send(replace(submit, key=key))
        return key

    def abort(self, abort: Abort) -> None:
        """The terminal event still comes, once the core has collected the step in flight."""
        if abort.key in self._routes:
            self._send(abort)

    def release(self, key: int, reason: FinishReason = FinishReason.ABORTED) -> None:
        """Its stream is gone: aborts the sequence, and nobody hears of it any more."""
        route = self._routes.get(key)
        if route is not None:
            self._routes[key] = replace(route, sink=_NOBODY)
            self._split = ([], [])
            self._send(Abort(key, reason))

    def abort_request(self, request_id: str) -> bool | None:
        """True: aborted; False: it had ended before; None: never heard of (or long ago)."""
        keys = self._live_ids.get(request_id)
        for key in keys or ():
            self._send(Abort(key))
        return True if keys else (False if request_id in self._ended_ids else None)

    def give_up(self, why: Fatal) -> None:
        """The core is taken for dead, whatever its process does."""
        self._last_words = self._last_words or why
        self.close()

    def command(self, command: Command) -> None:
        """Tells the core what is about no sequence, or about one that has its key."""
        self._send(command)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def num_live(self) -> int:
        return len(self._routes)

    @property
    def silence_ms(self) -> int:
        """Since the core's last word; it speaks every second, but not while it loads."""
        return (time.monotonic_ns() - self._heard_ns) // 1_000_000 if self._beats else 0

    def excuse(self, seconds: float) -> None:
        """This process slept so long: the core was not silent, nobody listened."""
        self._heard_ns = min(time.monotonic_ns(), self._heard_ns + int(seconds * 1e9))

    async def idle(self) -> None:
        """Waits until every sequence has ended."""
        await self._idle.wait()

    def fail_all(self, error: ServiceError) -> None:
        """Ends every live sequence with `error`; what the core still says of them is dropped."""
        for key in list(self._routes):
            self._fail(key, error)

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, chunk: bytes) -> None:
        self._heard_ns = time.monotonic_ns()
        for event in self._unframer.feed(chunk):
            match event:
                case StepOutput():
                    self._deliver(event)
                case Reject():
                    self._fail(event.key, event.error)
                case Progress():
                    self._listener.progressed(event)
                case Tally():
                    self.tally = event
                case StepTrace() | RankTrace():
                    self._listener.stepped(event)
                case Ready():
                    self._beats = True
                    # How large the pool is, is known before the first step.
                    self.load = self.load._replace(pages_total=event.engine.num_pages)
                    self._listener.ready(event)
                case KvEvents():
                    self._listener.kv_changed(event)
                case Answer():
                    self.asks.settle(event)
                case Fatal():  # its process may hang where it should end, if the device is broken
                    self.give_up(event)
                case _:
                    raise TypeError(f"the core sent a {type(event).__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        cause = self._last_words or Fatal(self._post_mortem())
        self._beats = False
        self.lost = EngineDead(cause.words)
        self.fail_all(self.lost)
        self.asks.fail_all(self.lost)
        self._listener.lost(self.lost)

    # ------------------------------------------------------------ inside

    def _send(self, command: Command) -> None:
        """Commands of one turn of the event loop share a frame. Raises EngineDead."""
        if self.lost is not None and isinstance(command, Ask):
            raise self.lost
        if self.holds(command):
            return
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(commands))

    def _deliver(self, output: StepOutput) -> None:
        self.load = output.load
        if output.keys != self._split[0]:
            self._split = (output.keys, group(output.keys, self._routes))
        groups = self._split[1]
        if len(groups) == 1 and len(groups[0][1]) == len(output.keys):
            sink, handles, _ = groups[0]
            sink.step(StepRows(output.seq, handles, *output[2:8], output.opened))
        else:
            offsets = list(itertools.accumulate(output.counts, initial=0))
            for sink, handles, rows in groups:
                sink.step(select(output, handles, rows, offsets))
        for row, finish in output.finished:
            self._end(output.keys[row], finish)

    def _fail(self, key: int, error: ServiceError) -> None:
        route = self._end(key, error)
        if route is not None:
            route.sink.failed(route.handle, error)

    def _end(self, key: int, outcome: Finish | ServiceError) -> Route | None:
        route = self._routes.pop(key, None)
        if route is None:
            return None
        is_fault = isinstance(outcome, EngineDead | InternalError)
        reason = outcome.reason if isinstance(outcome, Finish) else None
        self.finished[FinishReason.ERROR if is_fault else reason] += 1
        self._split = ([], [])
        keys = self._live_ids[route.request_id]
        keys.discard(key)
        if not keys:
            del self._live_ids[route.request_id]
            self._ended_ids[route.request_id] = None
            if len(self._ended_ids) > _REMEMBERED:
                self._ended_ids.popitem(last=False)
        if not self._routes:
            self._idle.set()
        route.ended(outcome)
        return route
