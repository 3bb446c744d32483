"""The frontend's side of one engine: a session that carries every request, and what it needs.

It does not know text. Messages are translated by engine_convert.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from frontend import engine_convert as convert
from frontend.call import Call
from frontend.engine_slots import Slots
from frontend.liveness import Liveness
from frontend.message_limit import MessageLimit
from frontend.messages import EngineFacts, Load
from frontend.messages import Sequence as EngineSequence
from frontend.rounds import Rounds
from tidemill.runtime.errors import (
    EngineDead,
    InternalError,
    ServiceError,
    Unavailable,
)
from tidemill.runtime.rpc import ended, to_error
from tidemill.security.client_tls import Dialer
from tidemill.telemetry.context import TraceContext
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

_LOG = logging.getLogger("tidemill.frontend.engine")
_ANSWER_S = 10.0
_FIRST_BACKOFF_S = 0.25
"""An engine that is away or starting is asked this often: it costs little, and a client waits."""
_LAST_BACKOFF_S = 5.0
_RETRY_AFTER_MS = 1000
_PASSING = (Unavailable, InternalError)
"""What time may heal; gRPC calls a stream INTERNAL whose engine dies in its first message."""

Connected = Callable[["EngineClient", EngineFacts], Awaitable[None]]


class EngineClient:
    """Keeps a session to one engine open, for as long as its owner wants.

    `on_connected` is awaited with the engine's facts before requests are accepted, `on_change` is
    called when a session has been opened, and when one that was open is lost. `load` is the
    engine's last report, which came at `reported_at` (seconds of the loop), `facts` what it said of
    itself while its session is open; `last_error` says why there is none.
    """

    def __init__(
        self,
        dialer: Dialer,
        *,
        silence_s: float,
        rounds: Rounds,
        on_connected: Connected,
        on_change: Callable[[EngineClient, bool], None],
    ) -> None:
        self.address = dialer.address
        self._dialer = dialer
        self._rounds = rounds
        self._on_connected, self._on_change = on_connected, on_change
        self.limit = MessageLimit(dialer.max_message_bytes)
        self._slots = Slots(rounds, self.limit)
        self._ready = False
        self._draining = False
        self._alive = Liveness(silence_s)
        self._task: asyncio.Task[None] | None = None
        self.channel: grpc.aio.Channel | None = None
        self.lost = asyncio.Event()
        """Of the session that is open, or of the one to come: set when it is lost."""
        self.facts: EngineFacts | None = None
        self.instance_id = ""
        self.num_pooling = 0
        """Prompts that are being pooled there. Written by engine_pool."""
        self._pooling_at_report = 0
        self.load, self.reported_at = Load(), -math.inf
        self.last_error = f"no connection to the engine at {self.address} yet"
        self._last_reason, self._is_retriable = "", True

    def start(self) -> None:
        """Begins connecting in the background. Call in the running loop, once."""
        self._task = asyncio.create_task(self._stay_connected(), name=f"engine {self.address}")

    async def close(self) -> None:
        """Ends the session; live requests fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._ready, self._last_reason = False, "CLOSED"
            self._lose(Unavailable("this frontend has closed the session", reason="CLOSED"))
        await self._hang_up()

    async def _hang_up(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            await channel.close()

    @property
    def state(self) -> str:
        """connecting, ready, silent (connected, but the engine or its core says nothing), or
        draining."""
        if not self._ready:
            return "connecting"
        if self._draining:
            return "draining"
        return "silent" if self._silence() else "ready"

    @property
    def is_draining(self) -> bool:
        """Whether it has said that it takes no new requests."""
        return self._draining

    @property
    def trouble(self) -> str:
        """Why it takes no requests; '' when it does."""
        reasons = {
            "connecting": self.last_error,
            "draining": f"the engine at {self.address} is draining",
            "silent": f"the engine at {self.address} is silent: {self._silence()}",
        }
        return reasons.get(self.state, "")

    @property
    def num_slots(self) -> int:
        """Sequences that the engine still owes something."""
        return len(self._slots)

    @property
    def sent(self) -> tuple[int, int]:
        """(sequences, prompt tokens) sent since the last report; ended sequences are taken off, and
        of prompts that are pooled only the number counts."""
        pooling = self.num_pooling - self._pooling_at_report
        return self._slots.sent + pooling, self._slots.sent_tokens

    def check_ready(self) -> None:
        """Raises Unavailable when new requests cannot be taken."""
        state = self.state
        if state == "draining":
            raise Unavailable(
                "the engine is draining: it finishes running requests and then stops",
                reason="DRAINING",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        if state != "ready":
            why = self._silence() if state == "silent" else self.last_error
            text = f"the engine at {self.address} is not up: {why}; try again shortly"
            if not self._is_retriable:
                text = f"cannot serve the engine at {self.address}: {why}"
            raise Unavailable(text, reason="ENGINE_NOT_UP", retry_after_ms=_RETRY_AFTER_MS)

    def open(
        self,
        request_id: str,
        sequences: Sequence[EngineSequence],
        *,
        timeout_ms: int | None,
        trace: TraceContext | None,
    ) -> Call:
        """Submits one request; its sequences form one group. Raises Unavailable, Overloaded when
        the engine does not read, and InvalidRequest for what no message holds."""
        self.check_ready()
        return self._slots.open(request_id, sequences, timeout_ms=timeout_ms, trace=trace)

    def cut_short(self, error: ServiceError) -> None:
        """Aborts every live request there; each ends with `error`."""
        self._slots.cut_short(error)

    async def fetch_tokenizer(self, folder: Path) -> None:
        """Writes the engine's tokenizer files into `folder`, and checks their digest."""
        stub = rpc.EngineInfoServiceStub(self.channel)
        stream = stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=60)
        try:
            await convert.unpack_tokenizer(stream, folder)
        finally:
            stream.cancel()

    def _silence(self) -> str:
        return self._alive.doubt()

    async def _stay_connected(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            error: ServiceError
            is_silent = False
            try:
                await self._serve_session()
                error = Unavailable("the engine closed the session")
            except grpc.RpcError as failure:
                error = to_error(failure)
            except TimeoutError:
                silence_s = self._alive.silence_s
                error = Unavailable(f"no sign of life from {self.address} for {silence_s:g} s")
                is_silent = True
            except ServiceError as failure:
                error = failure
            except Exception as bug:  # a bug must not leave the frontend without its session
                _LOG.exception("the session with the engine failed")
                error = InternalError(f"{type(bug).__name__}: {bug}")
            if self._ready or isinstance(error, Unavailable):
                backoff = _FIRST_BACKOFF_S
            self._lose(error)
            if is_silent:  # packets may vanish here for good; gRPC would notice much later
                await self._hang_up()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)

    def _lose(self, error: ServiceError) -> None:
        """Every live request ends; nothing is resubmitted here."""
        was_ready, self._ready = self._ready, False
        if was_ready or error.reason != self._last_reason:
            why = error.message
            _LOG.warning("no session with the engine: %s", why, extra={"engine": self.address})
        self.last_error, self._last_reason = error.message, error.reason
        self._is_retriable = isinstance(error, _PASSING)
        self.facts, self.load, self._pooling_at_report = None, Load(), 0
        slots, self._slots = self._slots, Slots(self._rounds, self.limit)
        gone, self.lost = self.lost, asyncio.Event()
        slots.close(self.loss())
        gone.set()
        if was_ready:
            self._on_change(self, False)

    def loss(self) -> EngineDead:
        """What a request hears whose session was lost."""
        return EngineDead(
            f"the engine was lost while it worked on this request: {self.last_error}",
            retry_after_ms=_RETRY_AFTER_MS,
            facts={"instance_id": self.instance_id},
        )

    async def _serve_session(self) -> None:
        """From the first question to the loss of the session."""
        self.channel = await self._dialer.fresh(self.channel)
        ask = rpc.EngineInfoServiceStub(self.channel).GetEngineInfo
        answer = await ask(pb.GetEngineInfoRequest(), timeout=_ANSWER_S)
        self.limit.heard(answer.limits.max_message_bytes)
        await self._on_connected(self, convert.to_facts(answer))
        session = rpc.EngineServiceStub(self.channel).Session()
        talk: list[asyncio.Task[None]] = []
        try:
            await session.write(convert.hello_frame())
            async with asyncio.timeout(_ANSWER_S):
                ack = await session.read()
            if ack is grpc.aio.EOF or ack.WhichOneof("frame") != "hello_ack":
                raise await ended(session)
            self.instance_id, self._draining = ack.hello_ack.instance_id, False
            self._alive = Liveness(self._alive.silence_s)
            self._ready = True
            extra = {"engine": self.address, "instance_id": self.instance_id}
            _LOG.info("session with the engine is open", extra=extra)
            self._on_change(self, True)
            for way in (self._read, self._write):
                talk.append(asyncio.create_task(way(session), name=f"engine {way.__name__}"))
            await self._alive.watch(talk[0])
        finally:
            session.cancel()
            for task in talk:  # the writer fails with the session; nobody else asks how
                task.cancel()
            await asyncio.gather(*talk, return_exceptions=True)

    async def _write(self, session: Any) -> None:
        while True:
            await session.write(await self._slots.outgoing())

    async def _read(self, session: Any) -> None:
        slots, alive = self._slots, self._alive
        while True:
            frame = await session.read()
            alive.heard()
            if frame is grpc.aio.EOF:
                raise await ended(session)
            kind = frame.WhichOneof("frame")
            if kind == "step":
                slots.on_step(frame.step)
            elif kind == "failed":
                slots.on_failed(frame.failed)
            elif kind == "load_report":
                self._on_report(frame.load_report)
            elif kind == "draining":
                self._draining = True

    def _on_report(self, report: pb.LoadReport) -> None:
        """Raises Unavailable when the core has been stuck for too long with requests of ours."""
        self.load, self.reported_at = convert.to_load(report), asyncio.get_running_loop().time()
        self._slots.reported(convert.known_submits(report))
        self._pooling_at_report = self.num_pooling
        self._alive.reported(report.engine_silence_ms / 1000, is_stalled=report.stalled)
        if self._alive.is_hopeless and len(self._slots):
            raise Unavailable(f"at {self.address} {self._silence()}")
