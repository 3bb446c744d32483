"""Requests of a decode engine whose prompt's KV is being fetched from a prefill engine.

Each is held back from the core until its pages are in the prefix index, or until they will not be:
then the core computes what is missing, so a failure costs time and never a token. It does not know
sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from engine_service.config import EngineConfig
from engine_service.core.control import Ask, Pause, PauseMode
from engine_service.core.handoff import (
    BeginTransfer,
    Begun,
    HasRoom,
    ImportPages,
    KvLayout,
    SharedPiece,
    end_of,
)
from engine_service.core.messages import Abort, Command, Submit
from engine_service.pieces import Files, laid
from engine_service.server import convert_transfer as convert
from engine_service.server.asks import Asks
from engine_service.server.kv_sources import Sources, is_unsaid
from engine_service.server.observer import Observer
from engine_service.server.same_host import shared_host
from engine_service.server.transfer_counts import RECEIVED, Transfer
from tidemill.runtime.errors import Overloaded, ServiceError
from tidemill.v1 import engine_pb2_grpc as rpc

_LOOK_S = 0.1
"""How often it is asked whether there is room for a prompt's KV."""
_REASON_S = 0.5
"""How long requests wait for nothing but the reason why they have waited for nothing."""
_LOG = logging.getLogger("tidemill.engine")


@dataclass(eq=False)
class _Fetch:
    """One transfer, and the sequences of its prompt that wait for it."""

    same: tuple[object, ...]
    """What its sequences have in common."""
    address: str
    first: Submit
    waiting: dict[int, Submit] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    moved: Transfer = field(default_factory=Transfer)
    error: str | None = None


class Fetches:
    """holds, close. `forward` hands a command to the core."""

    def __init__(
        self,
        config: EngineConfig,
        asks: Asks,
        forward: Callable[[Command], None],
        observer: Observer,
    ) -> None:
        self._config = config
        self._asks = asks
        self._forward = forward
        self._observer = observer
        self._counts = observer.metrics.transfers
        self._sources = Sources(config)
        self._fetches: dict[tuple[object, ...], _Fetch] = {}
        """Those that more sequences may join."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetch_of: dict[int, _Fetch] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._host = shared_host() if config.kv_connector != "grpc" else ""
        self._files = Files()
        self._room = asyncio.Lock()
        """Of who waits next for pages."""
        self.layout: KvLayout | None = None
        """Of this engine, once it is up."""

    @property
    def num_held(self) -> int:
        """Sequences that the core does not know yet."""
        return len(self._fetch_of)

    def holds(self, command: Command) -> bool:
        """Whether the command is kept back. A sequence that is ended meanwhile goes to the core at
        once, ahead of its end: then it is the core that answers, as always. So do all of them ahead
        of a pause that ends what is queued: they count as waiting."""
        if isinstance(command, Submit) and command.kv_source is not None:
            self._hold(command)
            return True
        if isinstance(command, Abort):
            self._let_go(command.key)
        asked = command.control if isinstance(command, Ask) else None
        if isinstance(asked, Pause) and asked.mode is PauseMode.ABORT:
            self._let_all_go()
        return False

    async def close(self) -> None:
        """Ends all fetches, and the connections."""
        self._let_all_go()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sources.close()

    def _hold(self, submit: Submit) -> None:
        """Sequences of one prompt share a fetch. One whose prompt is scored has to be computed,
        and more than may wait in the queue are not held: the core takes them by its rules."""
        is_scored = submit.sampling.prompt_logprobs is not None
        address = submit.kv_source.address if submit.kv_source else ""
        rests = self._sources.rests(address)
        if is_scored or rests or self.num_held >= self._config.max_queued_requests:
            self._forward(replace(submit, kv_source=None))
            return
        same = (address, submit.decoding.method, submit.cache_salt, submit.prompt)
        fetch = self._fetches.get(same)
        if fetch is None:
            fetch = self._begin(_Fetch(same, address, submit))
        fetch.waiting[submit.key] = submit
        self._fetch_of[submit.key] = fetch
        limit_s = self._config.kv_transfer_timeout_s
        if submit.deadline_ns is not None:
            limit_s = min(limit_s, (submit.deadline_ns - time.monotonic_ns()) / 1e9)
        late = asyncio.get_running_loop().call_later(limit_s, self._let_go, submit.key)
        self._timers[submit.key] = late

    def _begin(self, fetch: _Fetch) -> _Fetch:
        task = asyncio.create_task(self._run(fetch), name=f"KV from {fetch.address}")
        task.add_done_callback(lambda task: self._end(fetch, task))
        self._tasks.add(task)
        fetch.task = task
        self._fetches[fetch.same] = fetch
        return fetch

    def _let_go(self, key: int) -> None:
        """The core gets the sequence now. A fetch that nobody waits for any more is ended."""
        fetch = self._fetch_of.pop(key, None)
        if fetch is None:
            return
        self._timers.pop(key).cancel()
        if trace := self._observer.trace_of(key):
            trace.fetched(fetch.address, fetch.moved, fetch.error)
        self._forward(replace(fetch.waiting.pop(key), kv_source=None))
        if not fetch.waiting and fetch.task is not None:
            fetch.task.cancel()
            self._close(fetch)  # who comes before it has ended would get nothing of it

    def _let_all_go(self) -> None:
        for key in list(self._fetch_of):
            self._let_go(key)

    def _end(self, fetch: _Fetch, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._close(fetch)
        for key in list(fetch.waiting):
            self._let_go(key)

    def _close(self, fetch: _Fetch) -> None:
        """Nobody joins it from here on."""
        if self._fetches.get(fetch.same) is fetch:
            del self._fetches[fetch.same]

    async def _run(self, fetch: _Fetch) -> None:
        """Never raises but when it is cancelled."""
        address = fetch.address
        try:
            await self._fetch(fetch)
        except grpc.RpcError as failure:
            if is_unsaid(failure):
                failure = await self._reason(address) or failure
            self._tell(fetch, self._sources.error_of(failure, address))
        except ServiceError as error:
            self._tell(fetch, error)
        except Exception as bug:  # it must not cost the request
            fetch.error = repr(bug)
            _LOG.exception("fetching KV failed", extra={"source": address})

    async def _reason(self, address: str) -> grpc.RpcError | None:
        """Why there is no connection; None: there is one, or nobody knows so soon, or cannot ask.
        Only a call that sends nothing is sure to hear it. Raises nothing."""
        try:
            stream = self._open(address)
            try:
                async with asyncio.timeout(_REASON_S):
                    await stream.read()
            finally:
                stream.cancel()
        except grpc.RpcError as failure:
            return failure
        except TimeoutError:
            return None
        except Exception:  # certificates that are gone, a bug: the first failure is told then
            _LOG.debug("no reason from %s", address, exc_info=True)
        return None

    def _open(self, address: str) -> Any:
        return self._sources.call(
            address, lambda channel: rpc.KvTransferServiceStub(channel).Transfer()
        )

    def _tell(self, fetch: _Fetch, error: ServiceError) -> None:
        address, fetch.error = fetch.address, error.message
        _LOG.warning("no KV from %s, it is computed here: %s", address, error.message)
        if error.reason == "KV_SHARED" and self._config.kv_connector == "auto":
            self._sources.part(address)

    def _trace(self, fetch: _Fetch) -> tuple[str, str]:
        """(traceparent, tracestate) of the call, which is of a sequence that waits for it."""
        submit = next(iter(fetch.waiting.values()), fetch.first)
        if trace := self._observer.trace_of(submit.key):
            return trace.fetches()
        return submit.kv_source[1:] if submit.kv_source else ("", "")

    async def _fetch(self, fetch: _Fetch) -> None:
        submit, layout, address = fetch.first, self.layout, fetch.address
        method = submit.decoding.method or ""
        assert layout is not None, "a decode engine that is up has a layout"
        ask = BeginTransfer(submit.prompt, method, submit.cache_salt, True)
        begun: Begun = await self._asks.ask(ask, undo=end_of)
        try:
            if begun.num_found < begun.num_tokens and not begun.has_room:
                begun = await self._with_room(begun)
            if begun.num_found < begun.num_tokens:
                with self._counts.transfer(layout.model_id, RECEIVED, fetch.moved):
                    stream = self._open(address)
                    try:
                        host = "" if self._sources.is_apart(address) else self._host
                        trace = self._trace(fetch)
                        opening = convert.opening(submit, begun, layout, host, trace)
                        with self._sources.reaching(address):
                            await stream.write(opening)
                        is_whole = await self._receive(stream, begun, fetch, host)
                        await stream.done_writing()
                        while is_whole and await stream.read() is not grpc.aio.EOF:
                            is_whole = False  # more than was asked for
                    finally:
                        stream.cancel()
                    fetch.moved.outcome = "done" if is_whole else "partial"
            else:
                fetch.moved.outcome = "cached"
        finally:
            self._files.end(begun.transfer)
            self._asks.post(end_of(begun))

    async def _with_room(self, begun: Begun) -> Begun:
        """The transfer as it is when there is room for it, one after the other: no engine is asked
        to compute a prompt that would wait for pages here. Raises Overloaded when half of the time
        for a transfer is over."""
        limit_s = 0.5 * self._config.kv_transfer_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._room:
                while not begun.has_room:
                    await asyncio.sleep(_LOOK_S)
                    begun = begun._replace(**await self._asks.ask(HasRoom(begun.transfer)))
        except TimeoutError:
            raise Overloaded(f"its pages found no room for {limit_s:g} s") from None
        return begun

    async def _receive(self, stream: Any, begun: Begun, fetch: _Fetch, host: str) -> bool:
        """Whether all of it has come and found room."""
        at, model = begun.num_found, self.layout.model_id if self.layout else ""
        while at < begun.num_tokens and (answer := await stream.read()) is not grpc.aio.EOF:
            told, piece = answer.piece, convert.to_piece(answer.piece)
            convert.check_way(piece, self._config.kv_connector, host)
            shared = piece
            if not isinstance(shared, SharedPiece):
                shared = laid(self._files, begun.transfer, shared)
            found = ImportPages(begun.transfer, told.start, told.num_tokens, shared)
            if not await self._asks.ask(found):
                return False
            self._files.end(begun.transfer)
            fetch.moved.add(told.num_tokens, piece)
            self._counts.moved(model, RECEIVED, piece)
            at = told.start + told.num_tokens
            with suppress(asyncio.InvalidStateError):  # it has ended; the next read says how
                await stream.write(convert.taken())
        return at >= begun.num_tokens
