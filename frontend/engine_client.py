"""The frontend's side of the engine: one session that carries every request, and what it needs.

It does not know text. Messages are translated by engine_convert.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from frontend import engine_convert as convert
from frontend.call import Call
from frontend.messages import EngineFacts, Load
from frontend.messages import Sequence as EngineSequence
from frontend.outbox import Outbox
from frontend.rounds import Rounds
from tidemill import __version__
from tidemill.runtime.errors import (
    EngineDead,
    InternalError,
    ServiceError,
    Unavailable,
    from_grpc_code,
)
from tidemill.runtime.rpc import channel_options, to_error
from tidemill.telemetry.context import TraceContext
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

_LOG = logging.getLogger("tidemill.frontend.engine")
_PROTOCOL = (1, 0)
_SILENCE_S = 10.0
"""Load reports come every two seconds; five missed ones mean that the engine is gone."""
_ANSWER_S = 10.0
_FIRST_BACKOFF_S = 0.25
"""An engine that is away or starting is asked this often: it costs little, and a client waits."""
_LAST_BACKOFF_S = 5.0
_RETRY_AFTER_MS = 1000
_PASSING = (Unavailable, InternalError)
"""What time may heal; gRPC calls a stream INTERNAL whose engine dies in its first message."""

Connected = Callable[[EngineFacts], Awaitable[None]]


class EngineClient:
    """Keeps a session to one engine open, for as long as the frontend lives.

    `on_connected` is awaited with the engine's facts before requests are accepted. `load` is the
    engine's last report; `last_error` says why there is no connection.
    """

    def __init__(self, address: str, *, max_message_bytes: int, on_connected: Connected) -> None:
        self._address = address
        self._options = channel_options(max_message_bytes)
        self._on_connected = on_connected
        self._slots: dict[int, tuple[Call, int]] = {}
        self._handles = itertools.count(1)
        self._outbox: Outbox[pb.SessionRequest] = Outbox()
        self._rounds = Rounds()
        self._ready = asyncio.Event()
        self._draining = False
        self._task: asyncio.Task[None] | None = None
        self.channel: grpc.aio.Channel | None = None
        self.instance_id = ""
        self.load = Load()
        self.last_error = f"no connection to the engine at {address} yet"
        self._last_reason, self._is_retriable = "", True

    def start(self) -> None:
        """Begins connecting in the background. Call in the running loop, once."""
        self.channel = grpc.aio.insecure_channel(self._address, options=self._options)
        self._task = asyncio.create_task(self._stay_connected(), name="engine-session")

    async def close(self) -> None:
        """Ends the session; live requests fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.channel is not None:
            await self.channel.close()

    @property
    def state(self) -> str:
        """connecting, ready, stalled (not ready, but still asked: a step may be long), draining."""
        if not self._ready.is_set():
            return "connecting"
        return "draining" if self._draining else "stalled" if self.load.stalled else "ready"

    @property
    def num_slots(self) -> int:
        """Sequences that the engine still owes something."""
        return len(self._slots)

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether a session is open, after waiting for it at most this long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    def check_ready(self) -> None:
        """Raises Unavailable when new requests cannot be taken."""
        if self.state == "draining":
            raise Unavailable(
                "the engine is draining: it finishes running requests and then stops",
                reason="DRAINING",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        if self.state == "connecting":
            text = f"the engine at {self._address} is not up: {self.last_error}; try again shortly"
            if not self._is_retriable:
                text = f"cannot serve the engine at {self._address}: {self.last_error}"
            raise Unavailable(text, reason="ENGINE_NOT_UP", retry_after_ms=_RETRY_AFTER_MS)

    def open(
        self,
        request_id: str,
        sequences: Sequence[EngineSequence],
        *,
        timeout_ms: int | None,
        trace: TraceContext | None,
    ) -> Call:
        """Submits one request; its sequences form one group. Raises Unavailable, and
        Overloaded when the engine does not read."""
        self.check_ready()
        self._outbox.check_room()
        handles = [next(self._handles) for _ in sequences]
        call = Call(handles, release=self._release, stop=self._stop_matched, rounds=self._rounds)
        for handle, sequence in zip(handles, sequences, strict=True):
            self._slots[handle] = (call, sequence.index)
            submit = pb.Submit(handle=handle, spec=convert.to_spec(sequence))
            submit.spec.request_id = submit.spec.group = request_id
            if timeout_ms is not None:
                submit.spec.timeout_ms = timeout_ms
            if trace is not None:
                submit.spec.traceparent, submit.spec.tracestate = trace.traceparent, trace.state
            self._outbox.put(pb.SessionRequest(submit=submit))
        return call

    async def fetch_tokenizer(self, folder: Path) -> None:
        """Writes the engine's tokenizer files into `folder`, and checks their digest."""
        stub = _info(self.channel)
        stream = stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=60)
        try:
            await convert.unpack_tokenizer(stream, folder)
        finally:
            stream.cancel()

    def _release(self, handles: list[int], abort: bool) -> None:
        for handle in handles:
            self._slots.pop(handle, None)
        if abort and self._ready.is_set():
            gone = pb.AbortHandles(handles=handles)
            self._outbox.put(pb.SessionRequest(abort=gone))

    def _stop_matched(self, handle: int, num_tokens: int, stop: str) -> None:
        matched = pb.StopMatched(handle=handle, completion_tokens=num_tokens, stop_string=stop)
        self._outbox.put(pb.SessionRequest(stop_matched=matched))

    async def _stay_connected(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            error: ServiceError
            try:
                await self._serve_session()
                error = Unavailable("the engine closed the session")
            except grpc.RpcError as failure:
                error = to_error(failure)
            except TimeoutError:
                error = Unavailable(f"no sign of life from {self._address} for {_SILENCE_S} s")
            except ServiceError as failure:
                error = failure
            except Exception as bug:  # a bug must not leave the frontend without its session
                _LOG.exception("the session with the engine failed")
                error = InternalError(f"{type(bug).__name__}: {bug}")
            if self._ready.is_set() or isinstance(error, Unavailable):
                backoff = _FIRST_BACKOFF_S
            self._lose(error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)

    def _lose(self, error: ServiceError) -> None:
        """Every live request ends; nothing is resubmitted here."""
        if self._ready.is_set() or error.reason != self._last_reason:
            _LOG.warning("no session with the engine: %s", error.message)
        self.last_error, self._last_reason = error.message, error.reason
        self._is_retriable = isinstance(error, _PASSING)
        self._ready.clear()
        self.load = Load()
        self._outbox = Outbox()
        slots, self._slots = self._slots, {}
        for call, _ in slots.values():
            call.fail(
                EngineDead(
                    f"the engine was lost while it worked on this request: {error.message}",
                    retry_after_ms=_RETRY_AFTER_MS,
                    facts={"instance_id": self.instance_id},
                )
            )

    async def _serve_session(self) -> None:
        """From the first question to the loss of the session."""
        ask = _info(self.channel).GetEngineInfo
        answer = await ask(pb.GetEngineInfoRequest(), timeout=_ANSWER_S)
        await self._on_connected(convert.to_facts(answer))
        session = rpc.EngineServiceStub(self.channel).Session()
        writer: asyncio.Task[None] | None = None
        try:
            hello = pb.Hello(protocol_major=_PROTOCOL[0], protocol_minor=_PROTOCOL[1])
            hello.client_version = __version__
            hello.client_name = f"frontend {socket.gethostname()} {os.getpid()}"
            await session.write(pb.SessionRequest(hello=hello))
            async with asyncio.timeout(_ANSWER_S):
                ack = await session.read()
            if ack is grpc.aio.EOF or ack.WhichOneof("frame") != "hello_ack":
                await _raise_status(session)
            self.instance_id, self._draining = ack.hello_ack.instance_id, False
            self._ready.set()
            _LOG.info("session with the engine is open", extra={"instance_id": self.instance_id})
            writer = asyncio.create_task(self._write(session), name="engine-writer")
            await self._read(session)
        finally:
            if writer is not None:
                writer.cancel()
            session.cancel()

    async def _write(self, session: Any) -> None:
        outbox = self._outbox
        while True:
            await session.write(await outbox.get())

    async def _read(self, session: Any) -> None:
        while True:
            async with asyncio.timeout(_SILENCE_S):
                frame = await session.read()
            if frame is grpc.aio.EOF:
                await _raise_status(session)
            kind = frame.WhichOneof("frame")
            if kind == "step":
                self._on_step(frame.step)
            elif kind == "failed":
                self._on_failed(frame.failed)
            elif kind == "load_report":
                self.load = convert.to_load(frame.load_report)
            elif kind == "draining":
                self._draining = True

    def _on_step(self, step: pb.Step) -> None:
        """Hands the rows of one engine step to their calls. Unknown handles were aborted."""
        token_ids = convert.unpack_ids(step.token_ids)
        owners = [self._slots.get(handle) for handle in step.handles]
        at = 0
        for owner, count in zip(owners, step.counts, strict=True):
            if owner is not None and count:
                owner[0].add_tokens(owner[1], token_ids[at : at + count])
            at += count
        for given in step.prompt_logprobs:
            if (owner := owners[given.row]) is not None:
                owner[0].add_prompt_logprobs(owner[1], convert.to_logprobs(given.positions))
        for scored in step.logprobs:
            if (owner := owners[scored.row]) is not None:
                owner[0].add_logprobs(owner[1], convert.to_logprobs(scored.positions))
        for shown in step.canvas:
            if (owner := owners[shown.row]) is not None:
                owner[0].show_canvas(owner[1], convert.to_canvas(shown))
        for ended in step.finished:
            if (owner := owners[ended.row]) is not None:
                self._slots.pop(step.handles[ended.row], None)
                owner[0].finish(owner[1], convert.to_finish(ended.finish))

    def _on_failed(self, failed: pb.Failed) -> None:
        owner = self._slots.pop(failed.handle, None)
        if owner is None:
            return
        owner[0].close()  # the other sequences of the request
        owner[0].fail(convert.to_error(failed))


def _info(channel: grpc.aio.Channel | None) -> Any:
    return rpc.EngineInfoServiceStub(channel)


async def _raise_status(session: Any) -> None:
    """Raises what ended the stream; an orderly end is Unavailable too."""
    code, text = await session.code(), await session.details()
    if code is grpc.StatusCode.OK:
        raise Unavailable("the engine closed the session")
    raise from_grpc_code(code.value[0])(text or code.name, reason=code.name)
