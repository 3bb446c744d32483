"""The front desk: the state that every servicer of the engine shares, and who may come in.

It does not know gRPC; it is the listener of the core client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from engine_service.config import EngineConfig
from engine_service.core.control import SnapshotPages
from engine_service.core.facts import EngineFacts
from engine_service.core.journal import KvEvents
from engine_service.core.messages import Fatal, Load, Progress, RankTrace, Ready, StepTrace, Submit
from engine_service.server.convert_transfer import check_role
from engine_service.server.core_client import CoreClient
from engine_service.server.health import memory_in_use
from engine_service.server.kv_feed import KvFeed
from engine_service.server.metrics import DRAIN_TIMEOUT, Reading
from engine_service.server.observer import Observer
from engine_service.server.outlet import Draining, LoadReport
from engine_service.server.patience import Patience
from engine_service.server.request_trace import method_of
from engine_service.server.shares import Sink
from engine_service.server.state import SERVING, EngineState, StateBoard
from engine_service.server.tokenizer_files import TokenizerFiles, read_tokenizer
from engine_service.server.transfer_in import Fetches
from tidemill.runtime.errors import EngineDead, InternalError, ServiceError, Unavailable
from tidemill.telemetry.tracer import Tracer

_TICK_S = 0.25  # WatchState pushes derived changes at most four times a second
_TICKS_PER_REPORT = 2  # the session's heartbeat: twice a second, and sooner when there is news
_STALL_S = 1.0  # a tick that comes so late says that this process slept, with its core or without
_ROUTED_BY = 5  # fields of Load that say how full the engine is; the others always grow
_LOG = logging.getLogger("tidemill.engine")


class OpenSession(Protocol):
    """What the desk needs of a session."""

    def notify(self, notice: LoadReport | Draining) -> None: ...

    def close(self, error: ServiceError | None = None) -> None: ...
    def abort_all(self) -> list[str]: ...


class Desk:
    """Everything between start-up and shutdown that is not one stream's own."""

    def __init__(
        self, config: EngineConfig, *, tracer: Tracer, post_mortem: Callable[[], str]
    ) -> None:
        self.config = config
        self.instance_id = uuid.uuid4().hex
        self.started_unix_ns = time.time_ns()
        self.board = StateBoard()
        self.core = CoreClient(self, post_mortem=post_mortem)
        self.kv_feed = KvFeed(lambda seen: self.core.asks.ask(SnapshotPages(), seen))
        self.dead = asyncio.Event()
        self.stop = asyncio.Event()
        """Somebody wants the process to drain and end."""
        self.drained = asyncio.Event()
        """Nothing runs any more, or what did was ended."""
        self.num_cut_short = 0
        """Requests that were ended because the time to drain was over."""
        self.patience = Patience(config.drain_timeout_s)
        self.facts: EngineFacts | None = None
        self.last_error: str | None = None
        self.tokenizer: TokenizerFiles | ServiceError | None = None
        self.sessions: dict[str, OpenSession] = {}
        self.sending: set[asyncio.Task[None]] = set()
        """Transfers to other engines: they go on when their prompt's sequence has ended."""
        self._session_numbers = itertools.count(1)
        self.observer = Observer(config, tracer, read=self.reading, trace_steps=self.core.command)
        self.fetches = Fetches(config, self.core.asks, self.core.command, self.observer)
        self.core.holds = self.fetches.holds
        self._is_closed = False
        self._started = time.monotonic()
        self._opening: asyncio.Task[None] | None = None

    def open_facts(self) -> EngineFacts:
        """The facts, once the engine is up; raises Unavailable naming the stage before that."""
        if self.core.lost is not None:
            raise self.core.lost
        if self.facts is None or self.board.state < EngineState.READY:
            raise Unavailable(
                f"the engine is still starting: {self.board.snapshot.detail}",
                reason="STARTING",
                retry_after_ms=1000,
            )
        return self.facts

    def open_tokenizer(self) -> TokenizerFiles:
        """Its files; raises Unavailable like `open_facts`, and what there is instead of files."""
        self.open_facts()
        assert self.tokenizer is not None, "the tokenizer is read before the engine is ready"
        if isinstance(self.tokenizer, ServiceError):
            raise self.tokenizer
        return self.tokenizer

    def check_open(self) -> EngineFacts:
        """Like `open_facts`, and raises Unavailable when no new work is taken."""
        facts = self.open_facts()
        if self._is_closed or self.board.state not in (*SERVING, EngineState.DRAINING):
            raise Unavailable(
                "the engine is draining and takes no new requests; send them to another one",
                reason="DRAINING",
                retry_after_ms=1000,
            )
        return facts

    @contextmanager
    def admitting(self, method: str, trace: tuple[str, str]) -> Iterator[None]:
        """Around what may refuse a request before it is a sequence: that is counted and traced."""
        try:
            yield
        except ServiceError as error:
            self.observer.refused(error, self.facts, method, trace)
            raise

    def submit(self, submit: Submit, sink: Sink, handle: int, trace: tuple[str, str]) -> int:
        """Starts a sequence; `trace` is the caller's (traceparent, tracestate)."""
        with self.admitting(method_of(submit), trace):
            facts = self.check_open()
            check_role(facts.role, submit)
        submit, ended, began = self.observer.begin(submit, trace, facts)
        key = self.core.submit(submit, sink, handle, ended=ended)
        began(key)
        return key

    def reading(self) -> Reading:
        """How the engine stands; called from other threads too, which see that the core was not
        heard when the event loop is too busy to say so."""
        snapshot, silence_ms = self.board.snapshot, self.core.silence_ms
        if silence_ms / 1000 > self.config.heartbeat_timeout_s and not snapshot.stalled:
            snapshot = snapshot._replace(stalled=True, detail=self._silence_text())
        return Reading(
            snapshot=snapshot,
            tally=self.core.tally,
            facts=self.facts,
            silence_ms=silence_ms,
            sessions=len(self.sessions),
            uptime_s=time.monotonic() - self._started,
        )

    def enter(self, session: OpenSession) -> str:
        """Registers a session and returns its id."""
        session_id = f"{self.instance_id}/{next(self._session_numbers)}"
        self.sessions[session_id] = session
        return session_id

    def leave(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)

    async def tick(self) -> None:
        """Derives READY and BUSY from the load and sends heartbeats; runs until cancelled.

        Frontends route by what they are told, so they hear of every change, four times a second.
        """
        told: tuple[object, ...] = ()
        for turn in itertools.count(1):
            began = time.monotonic()
            await asyncio.sleep(_TICK_S)
            slept_s = time.monotonic() - began - _TICK_S
            if slept_s > _STALL_S:
                self.core.excuse(slept_s)
            silence_s = self.core.silence_ms / 1000
            stalled = silence_s > self.config.heartbeat_timeout_s
            detail = self._silence_text() if stalled else self._finished_text()
            self.board.observe(self.load, detail, stalled=stalled)
            if stalled and 0 < self.config.hang_timeout_s < silence_s:
                words = f"it has said nothing for {silence_s:.0f} s (--hang-timeout-s)"
                self.core.give_up(Fatal(words))
            news = (*self.load[:_ROUTED_BY], stalled, self.board.snapshot.paused)
            if turn % _TICKS_PER_REPORT == 0 or news != told:
                told, report = news, self.report
                for session in self.sessions.values():
                    session.notify(report)

    @property
    def report(self) -> LoadReport:
        """How the engine is loaded, and how it is."""
        reading = self.reading()
        return LoadReport(
            load=self.load,
            engine_silence_ms=reading.silence_ms,
            stalled=reading.snapshot.stalled,
            state=reading.snapshot.state,
            memory_used=memory_in_use(reading),
            memory_total=reading.tally.memory.total,
            paused=reading.snapshot.paused,
        )

    def ask_to_stop(self, drain_timeout_s: float) -> None:
        """The process drains and ends as after SIGTERM. Behind others one can only hurry it."""
        self.patience.allow(drain_timeout_s, only_less=self.stop.is_set())
        self.stop.set()

    @property
    def load(self) -> Load:
        """The core's, with what it has not spoken of yet and what is held back from it: both are
        live here already."""
        load = self.core.load
        known = load.waiting + self.fetches.num_held
        return load._replace(waiting=max(known, self.core.num_live - load.running))

    def drain(self) -> None:
        """Not ready any more, and sessions are told; who has not heard of it is still served,
        until `refuse`."""
        self.board.move(EngineState.DRAINING, f"{self.core.num_live} requests still run")
        left_s = self.config.drain_pause_s + self.patience.seconds
        notice = Draining(int(left_s * 1000))
        for session in self.sessions.values():
            session.notify(notice)

    def refuse(self) -> None:
        """No new work from here on."""
        self._is_closed = True

    async def finish(self) -> None:
        """Waits for what runs, and ends what outlasts the patience for it."""
        if not await self.patience.wait(self._finished()):
            self.cut_short(f"{self.patience.seconds:g} s of draining are over")
        self.drained.set()

    async def _finished(self) -> None:
        """Waits until no request runs and no transfer."""
        while self.sending:
            await asyncio.wait(self.sending)
        await self.core.idle()

    def cut_short(self, why: str) -> None:
        """Ends what still runs, behind its partial output; it may be sent to another engine."""
        # A transfer that still computes its prompt is a live request, too.
        self.num_cut_short = max(self.core.num_live, len(self.sending))
        text = f"the engine is shutting down and {why}; send the request to another engine"
        self.core.fail_all(Unavailable(text, reason=DRAIN_TIMEOUT, retry_after_ms=1000))

    def close_sessions(self, error: ServiceError | None = None) -> None:
        for session in list(self.sessions.values()):
            session.close(error)
        self.kv_feed.close(error)

    def _finished_text(self) -> str:
        """The counters of ended requests, for people and tests: `finished: length=3 refused=1`."""
        if not self.core.finished:
            return "no request has ended yet"
        counts = sorted(self.core.finished.items(), key=lambda one: one[0] or math.inf)
        return "finished: " + " ".join(
            f"{'refused' if r is None else r.name.lower()}={n}" for r, n in counts
        )

    def _silence_text(self) -> str:
        return f"the core has said nothing for more than {self.config.heartbeat_timeout_s:g} s"

    # ------------------------------------------------------------ CoreListener

    def progressed(self, progress: Progress) -> None:
        if self.board.state is EngineState.LOADING:
            of = f" {progress.done}/{progress.total}" if progress.total else ""
            self.board.move(EngineState.LOADING, progress.stage + of)

    def stepped(self, trace: StepTrace | RankTrace) -> None:
        self.observer.stepped(trace)

    def ready(self, ready: Ready) -> None:
        self.observer.tell_core()
        self._opening = asyncio.create_task(self._open(ready.engine))

    async def _open(self, facts: EngineFacts) -> None:
        try:
            folder, said = self.config.tokenizer or facts.tokenizer_dir, self.config.hf_overrides
            self.tokenizer = await asyncio.to_thread(read_tokenizer, folder, said)
        except ServiceError as error:
            self.tokenizer = error
            _LOG.warning("%s", error)
        except Exception as bug:  # token ids need no tokenizer, and nobody else would tell of it
            self.tokenizer = InternalError(f"the tokenizer cannot be read: {bug!r}")
            _LOG.exception("reading the tokenizer failed")
        self.facts, self.fetches.layout = facts, facts.kv_layout
        if self.board.state is EngineState.LOADING:
            self.board.move(EngineState.READY, self._finished_text())

    def kv_changed(self, told: KvEvents) -> None:
        self.kv_feed.publish(told)

    def lost(self, error: EngineDead) -> None:
        self.dead.set()
        if self.board.state not in (EngineState.SHUTDOWN, EngineState.ERROR):
            self.last_error = error.message
            self.board.move(EngineState.ERROR, error.message)
            self.close_sessions(error)
