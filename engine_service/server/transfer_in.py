"""Requests of a decode engine whose prompt's KV is being fetched from a prefill engine.

Each is held back from the core until its pages are in the prefix index, or until they will not be:
then the core computes what is missing, so a failure costs time and never a token. It does not know
sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from engine_service.config import EngineConfig
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
from engine_service.server import convert_transfer as convert
from engine_service.server.asks import Asks
from engine_service.server.same_host import shared_host
from engine_service.server.transfer_counts import RECEIVED, TransferCounts
from tidemill.runtime.errors import FailedPrecondition, Overloaded, ServiceError, Unsupported
from tidemill.runtime.rpc import channel_options, to_error
from tidemill.security.client_tls import ClientTls, Dialer, Dialing
from tidemill.v1 import engine_pb2_grpc as rpc

_MAX_SOURCES = 64
"""Prefill engines that a connection is kept to; the oldest one is closed."""
_APART_S = 60.0
"""How long an engine whose memory could not be read is asked for messages: it may just be gone."""
_LOOK_S = 0.1
"""How often it is asked whether there is room for a prompt's KV."""
_REST = 9
"""An engine is left alone for so many times what it took not to reach it, so that prompts wait for
nothing in at most a tenth of the time."""
_LOG = logging.getLogger("tidemill.engine")


def check_role(role: str, submit: Submit) -> None:
    """Raises FailedPrecondition and Unsupported for what an engine of this role does not do."""
    if role == "prefill" and submit.pool is None and not submit.only_prefills:
        raise FailedPrecondition(
            "this engine is --role prefill: it computes prompts for decode engines and generates "
            "nothing; send requests to an engine of --role decode or both",
            reason="PREFILL_ONLY",
        )
    if submit.kv_source is not None and role != "decode":
        raise Unsupported(
            f"kv_source is {submit.kv_source.address!r}, and this engine is --role {role}; only "
            "engines of --role decode fetch KV: leave it out",
            param="kv_source",
        )


@dataclass(eq=False)
class _Fetch:
    """One transfer, and the sequences of its prompt that wait for it."""

    first: Submit
    waiting: dict[int, Submit] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Fetches:
    """holds, close. `forward` hands a command to the core."""

    def __init__(
        self,
        config: EngineConfig,
        asks: Asks,
        forward: Callable[[Command], None],
        counts: TransferCounts,
    ) -> None:
        self._config = config
        self._asks = asks
        self._forward = forward
        self._counts = counts
        tls = None
        if config.kv_tls_ca is not None:
            tls = ClientTls(config.kv_tls_ca, config.tls_cert, config.tls_key)
        self._dialing = Dialing(channel_options(config.max_message_bytes), tls)
        self._sources: dict[str, tuple[Dialer, grpc.aio.Channel | None]] = {}
        self._fetches: dict[tuple[object, ...], _Fetch] = {}
        self._fetch_of: dict[int, _Fetch] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._host = shared_host() if config.kv_connector != "grpc" else ""
        self._apart: dict[str, float] = {}
        """Until when engines are not asked for shared memory, by address."""
        self._resting: dict[str, float] = {}
        """Until when engines are not asked at all, by address."""
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
        once, ahead of its end: then it is the core that answers, as always."""
        if isinstance(command, Submit) and command.kv_source is not None:
            self._hold(command)
            return True
        if isinstance(command, Abort):
            self._let_go(command.key)
        return False

    async def close(self) -> None:
        """Ends all fetches, and the connections."""
        for key in list(self._fetch_of):
            self._let_go(key)
        tasks = [one.task for one in self._fetches.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, channel in self._sources.values():
            if channel is not None:
                await channel.close()
        self._sources.clear()

    def _hold(self, submit: Submit) -> None:
        """Sequences of one prompt share a fetch. One whose prompt is scored has to be computed,
        and more than may wait in the queue are not held: the core takes them by its rules."""
        is_scored = submit.sampling.prompt_logprobs is not None
        address = submit.kv_source.address if submit.kv_source else ""
        rests = self._resting.get(address, 0.0) > time.monotonic()
        if is_scored or rests or self.num_held >= self._config.max_queued_requests:
            self._forward(replace(submit, kv_source=None))
            return
        same = (address, submit.decoding.method, submit.cache_salt, submit.prompt)
        fetch = self._fetches.get(same)
        if fetch is None:
            fetch = self._fetches[same] = _Fetch(submit)
            fetch.task = asyncio.create_task(self._run(fetch, address), name=f"KV from {address}")
            fetch.task.add_done_callback(lambda _: self._end(same))
        fetch.waiting[submit.key] = submit
        self._fetch_of[submit.key] = fetch
        limit_s = self._config.kv_transfer_timeout_s
        if submit.deadline_ns is not None:
            limit_s = min(limit_s, (submit.deadline_ns - time.monotonic_ns()) / 1e9)
        late = asyncio.get_running_loop().call_later(limit_s, self._let_go, submit.key)
        self._timers[submit.key] = late

    def _let_go(self, key: int) -> None:
        """The core gets the sequence now. A fetch that nobody waits for any more is ended."""
        fetch = self._fetch_of.pop(key, None)
        if fetch is None:
            return
        self._timers.pop(key).cancel()
        self._forward(replace(fetch.waiting.pop(key), kv_source=None))
        if not fetch.waiting and fetch.task is not None:
            fetch.task.cancel()

    def _end(self, same: tuple[object, ...]) -> None:
        for key in list(self._fetches.pop(same).waiting):
            self._let_go(key)

    async def _run(self, fetch: _Fetch, address: str) -> None:
        """Never raises but when it is cancelled."""
        try:
            await self._fetch(fetch.first, address)
        except grpc.RpcError as failure:
            self._tell(to_error(failure), address)
        except ServiceError as error:
            self._tell(error, address)
        except Exception:  # a bug here must not cost the request
            _LOG.exception("fetching KV failed", extra={"source": address})

    def _tell(self, error: ServiceError, address: str) -> None:
        _LOG.warning("no KV from %s, it is computed here: %s", address, error.message)
        if error.reason == "KV_SHARED" and self._config.kv_connector == "auto":
            now = time.monotonic()
            self._apart = {one: until for one, until in self._apart.items() if until > now}
            self._apart[address] = now + _APART_S

    async def _fetch(self, submit: Submit, address: str) -> None:
        layout, method = self.layout, submit.decoding.method or ""
        assert layout is not None, "a decode engine that is up has a layout"
        ask = BeginTransfer(submit.prompt, method, submit.cache_salt, True)
        begun: Begun = await self._asks.ask(ask, undo=end_of)
        try:
            if begun.num_found < begun.num_tokens and not begun.has_room:
                begun = await self._with_room(begun)
            if begun.num_found < begun.num_tokens:
                with self._counts.transfer(layout.model_id, RECEIVED) as counted:
                    stream = rpc.KvTransferServiceStub(await self._channel(address)).Transfer()
                    try:
                        is_apart = self._apart.get(address, 0.0) > time.monotonic()
                        host = "" if is_apart else self._host
                        with self._reaching(address):
                            await stream.write(convert.opening(submit, begun, layout, host))
                        is_whole = await self._receive(stream, begun, layout.model_id, host)
                        await stream.done_writing()
                        while is_whole and await stream.read() is not grpc.aio.EOF:
                            is_whole = False  # more than was asked for
                    finally:
                        stream.cancel()
                    counted.outcome = "done" if is_whole else "partial"
        finally:
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

    @contextmanager
    def _reaching(self, address: str) -> Iterator[None]:
        """Around what waits for a connection: in vain, too, when it took all the time there is.
        That a client has left says nothing of an engine."""
        began = time.monotonic()
        try:
            yield
        except (grpc.RpcError, asyncio.CancelledError) as failure:
            now, most_s = time.monotonic(), self._config.kv_transfer_timeout_s
            if isinstance(failure, asyncio.CancelledError) and now - began < 0.9 * most_s:
                raise
            self._resting = {one: until for one, until in self._resting.items() if until > now}
            rested = now + min(_APART_S, _REST * (now - began))
            self._resting[address] = max(rested, self._resting.get(address, 0.0))
            raise

    async def _receive(self, stream: Any, begun: Begun, model: str, host: str) -> bool:
        """Whether all of it has come and found room."""
        at = begun.num_found
        while at < begun.num_tokens and (answer := await stream.read()) is not grpc.aio.EOF:
            piece = convert.to_import(begun.transfer, answer)
            self._check_way(piece, host)
            if not await self._asks.ask(piece):
                return False
            self._counts.moved(model, RECEIVED, piece.piece)
            at = piece.start + piece.num_tokens
            with suppress(asyncio.InvalidStateError):  # it has ended; the next read says how
                await stream.write(convert.taken())
        return at >= begun.num_tokens

    def _check_way(self, ask: ImportPages, host: str) -> None:
        """Raises FailedPrecondition for a piece that came another way than was asked for: nobody
        else says which files of other processes are read here."""
        is_shared = isinstance(ask.piece, SharedPiece)
        if is_shared and not host:
            raise FailedPrecondition(
                "shared memory came, and messages were asked for", reason="KV_PIECE"
            )
        if not is_shared and self._config.kv_connector == "shm":
            raise FailedPrecondition(
                "a message came, and --kv-connector is shm here; run both engines on one host as "
                "one user with it, or pass --kv-connector auto",
                reason="KV_SHARED",
            )

    async def _channel(self, address: str) -> grpc.aio.Channel:
        dialer, channel = self._sources.pop(address, (None, None))
        dialer = dialer or self._dialing.dialer(address)
        channel = await dialer.fresh(channel)
        self._sources[address] = (dialer, channel)
        if len(self._sources) > _MAX_SOURCES:
            _, oldest = self._sources.pop(next(iter(self._sources)))
            if oldest is not None:
                await oldest.close()
        return channel
