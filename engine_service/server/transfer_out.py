"""One Transfer call at a prefill engine: computes a prompt, then sends its pages piece by piece.

The call is the transfer: whatever ends it, nothing is held for it any more. It does not know the
core's pipe.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc

from engine_service.core.control import PAUSED
from engine_service.core.handoff import (
    BeginTransfer,
    Begun,
    Exported,
    ExportPages,
    Piece,
    end_of,
    most_on_the_way,
)
from engine_service.core.messages import Finish, FinishReason, Submit
from engine_service.pieces import Views, inlined
from engine_service.server import convert_transfer as convert
from engine_service.server.desk import Desk
from engine_service.server.outlet import StepRows
from engine_service.server.request_trace import trace_sending
from engine_service.server.same_host import shared_host
from engine_service.server.transfer_counts import SENT, Transfer
from tidemill.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ServiceError,
    Unavailable,
)
from tidemill.telemetry.tracer import Span

_Heard = TypeVar("_Heard")
_LOG = logging.getLogger("tidemill.engine")

PIECE_BYTES = 2 << 20
"""Of a piece, unless one unit is more: what a core moves between two steps in about 1 ms."""
HEADER_BYTES = 64
"""Of a message, at most, beside its piece."""
MAX_SENDING = 16
"""Transfers that send at the same time; each may hold a window of host memory, twice where it sends
messages."""
NEVER = 1 << 62
"""More pieces than any transfer has."""


class Sending:
    """run. `slots` bounds how many send at once; `views` of what rank 0 has read."""

    def __init__(self, desk: Desk, stream: Any, slots: asyncio.Semaphore, views: Views) -> None:
        self._desk = desk
        self._stream = stream
        self._slots = slots
        self._views = views
        self._is_shared = False
        self._sent = Transfer()
        self._num_out = 0
        self._taken = asyncio.Event()
        self._ended: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Raises the ServiceError that is the call's status, or CancelledError where nobody would
        read one."""
        frame = await self._within("its TransferOpen", self._stream.read())
        if frame is grpc.aio.EOF or frame.WhichOneof("frame") != "open":
            raise FailedPrecondition("the first frame of a transfer must be TransferOpen")
        trace = (frame.open.traceparent, frame.open.tracestate)
        span, peer = self._desk.observer.sends(trace), self._stream.peer()
        with trace_sending(span, peer, self._sent):
            await self._answer(frame.open, span)

    async def _answer(self, opened: Any, span: Span) -> None:
        desk = self._desk
        facts = desk.check_open()
        convert.check_layout(opened, facts.kv_layout, facts.role)
        connector = desk.config.kv_connector
        self._is_shared = convert.check_connector(opened, connector, shared_host())
        with desk.observer.metrics.transfers.transfer(facts.model_id, SENT, self._sent):
            begun: Begun = await desk.core.asks.ask(
                BeginTransfer(opened.prompt_token_ids, opened.method, opened.cache_salt, False),
                undo=end_of,
            )
            try:
                self._check_size(begun.unit_bytes)
                if begun.num_found < begun.num_tokens:
                    self._check_runs()
                    left_s = self._stream.time_remaining()
                    await self._compute(convert.to_prefill(opened, left_s), _below(span))
                async with self._slots:
                    sending = span.child("engine.send")
                    try:
                        is_whole = await self._send(begun, opened, facts.model_id)
                    finally:
                        sending.end()
            finally:
                desk.core.asks.post(end_of(begun))
            self._sent.outcome = "done" if is_whole else "partial"

    def _check_size(self, unit_bytes: int) -> None:
        """Raises FailedPrecondition where no message holds a unit, before a prompt is computed."""
        limit = self._desk.config.max_message_bytes
        if not self._is_shared and unit_bytes + HEADER_BYTES > limit:
            raise FailedPrecondition(
                f"a unit of KV is {unit_bytes} bytes, a gRPC message at most {limit}; give both "
                "engines a smaller --page-size, or a larger --max-message-bytes",
                reason="KV_UNIT_TOO_LARGE",
            )

    def _check_runs(self) -> None:
        """Raises Unavailable where nothing is computed now: whoever asks can do it himself."""
        if self._desk.board.snapshot.paused:
            raise Unavailable(f"{PAUSED} and computes no prompts", reason="PAUSED")

    async def _compute(self, submit: Submit, trace: tuple[str, str]) -> None:
        """Until the prompt's units are in the index. Leaving early aborts it."""
        key = self._desk.submit(submit, self, 0, trace)
        try:
            finish = await self._ended
        finally:
            self._desk.core.release(key)
        if finish.reason is not FinishReason.LENGTH:
            word = finish.reason.name.lower()
            raise Unavailable(f"the prompt was not computed: {word} {finish.detail}")

    async def _send(self, begun: Begun, opened: Any, model: str) -> bool:
        """Whether all of it was there to be sent; returns when all that was sent is taken."""
        desk = self._desk
        most = min(PIECE_BYTES, desk.config.max_message_bytes // 2)
        units = max(1, most // begun.unit_bytes)
        window = most_on_the_way(units * begun.unit_bytes)
        step = units * begun.unit
        starts = iter(range(opened.skip_tokens, begun.num_tokens, step))
        asked: deque[tuple[int, asyncio.Future[Exported]]] = deque()
        reader = asyncio.create_task(self._read_taken())
        try:
            while True:
                if reader.done():
                    reader.result()  # raises what it has met instead of a frame
                while max(self._num_out, len(asked)) < window and (start := next(starts, -1)) >= 0:
                    self._num_out += 1
                    ask = ExportPages(begun.transfer, start, most)
                    asked.append((start, asyncio.ensure_future(desk.core.asks.ask(ask))))
                if not asked and self._num_out <= 0:
                    return True
                if not asked:
                    self._taken.clear()
                    await self._within("a PieceTaken", self._taken.wait())
                    continue
                start, answer = asked.popleft()
                exported = await answer
                if exported.piece is None or exported.num_tokens == 0:
                    return False
                piece: Piece = exported.piece
                if not self._is_shared:
                    piece = inlined(self._views, exported.piece)
                await self._write(convert.piece_message(start, exported.num_tokens, piece))
                self._sent.add(exported.num_tokens, piece)
                desk.observer.metrics.transfers.moved(model, SENT, piece)
        finally:
            reader.cancel()
            for _, answer in asked:
                answer.cancel()
            await asyncio.gather(reader, *(a for _, a in asked), return_exceptions=True)

    async def _read_taken(self) -> None:
        """Counts what the caller has read; one that says no more is not waited for any more."""
        try:
            while await self._stream.read() is not grpc.aio.EOF:
                self._num_out -= 1
                self._taken.set()
        finally:
            self._num_out = -NEVER
            self._taken.set()

    async def _write(self, message: Any) -> None:
        """Raises CancelledError where the caller reads no more."""
        try:
            await self._within("that it reads a KvPiece", self._stream.write(message))
        except DeadlineExceeded as silent:
            # It would not read a status either, and gRPC would wait until it does.
            _LOG.warning("a transfer is dropped: %s", silent.message)
            raise asyncio.CancelledError from silent

    async def _within(self, due: str, heard: Awaitable[_Heard]) -> _Heard:
        """What the caller does, which has as long for each as it waits for all: one that lives and
        says nothing would hold a slot, and the memory of its window, for ever. Raises
        DeadlineExceeded."""
        limit_s = self._desk.config.kv_transfer_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await heard
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine that asks has been silent for {limit_s:g} s, and {due} was due; see "
                "why its process hangs, or pass a larger --kv-transfer-timeout-s to this engine",
                reason="KV_SILENT",
            ) from None

    # ------------------------------------------------------------ Sink

    def step(self, rows: StepRows) -> None:
        """Tokens of the prompt's sequence are nobody's; its finish is what is waited for."""
        for _, finish in rows.finished:
            if not self._ended.done():
                self._ended.set_result(finish)

    def failed(self, handle: int, error: ServiceError) -> None:
        """The sequence got no finish."""
        if not self._ended.done():
            self._ended.set_exception(error)


def _below(span: Span) -> tuple[str, str]:
    """(traceparent, tracestate) of what is done for it."""
    return (span.context.traceparent, span.context.state) if span.context else ("", "")
