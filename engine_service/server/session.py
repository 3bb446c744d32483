"""One Session stream: many requests in, one message per engine step out.

It does not know the core's pipe; it owns the handles of its stream and their one writer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from engine_service.core.messages import Abort, FinishReason
from engine_service.server.convert import check_hello, to_submit
from engine_service.server.convert_out import hello_ack, notice_frame, step_frames
from engine_service.server.desk import Desk
from engine_service.server.outlet import Draining, Failure, LoadReport, Outlet, Pong, StepRows
from engine_service.server.request_trace import SPAN
from engine_service.server.tokenizer_files import TokenizerFiles
from tidemill.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    ServiceError,
    Unsupported,
)

_MAX_UNREAD = 8192  # rows and notices; beyond it nothing more is read from the client
_HELLO_S = 10.0
"""For the first frame of a stream: a client has it ready when it opens one."""
_LOG = logging.getLogger("tidemill.engine")


class Session:
    """Reader, writer and handle table of one stream. Its loss aborts everything it started."""

    def __init__(self, desk: Desk, stream: Any) -> None:
        self._desk = desk
        self._stream = stream
        self._outlet = Outlet()
        self._keys: dict[int, int] = {}
        self._ids: dict[int, str] = {}
        self._half_closed = False
        self._num_submits = 0

    async def run(self) -> None:
        """Serves the stream to its end; raises the ServiceError that is its status."""
        session_id = self._desk.enter(self)
        try:
            await self._stream.send_initial_metadata((("tidemill-session", session_id),))
            await self._greet()
            await self._serve()
        finally:
            self._desk.leave(session_id)
            self._release_all()
        if self._outlet.error is not None:
            raise self._outlet.error

    async def _greet(self) -> None:
        try:
            async with asyncio.timeout(_HELLO_S):
                frame = await self._stream.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no Hello within {_HELLO_S:g} s; a session begins with it, so send it at once"
            ) from None
        if frame is grpc.aio.EOF or frame.WhichOneof("frame") != "hello":
            raise FailedPrecondition("the first frame of a session must be Hello")
        check_hello(frame.hello)
        desk = self._desk
        facts, found = desk.check_open(), desk.tokenizer
        sha256 = found.sha256 if isinstance(found, TokenizerFiles) else ""
        limit = desk.config.max_message_bytes
        await self._stream.write(hello_ack(facts, desk.instance_id, sha256, limit))
        self.notify(desk.report)  # a new frontend needs not guess until the next heartbeat

    async def _serve(self) -> None:
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                reader.result()
                self._half_closed = True
                self._close_when_done()
                await writer
            writer.result()
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self) -> None:
        """Until the client half-closes."""
        while (frame := await self._stream.read()) is not grpc.aio.EOF:
            match frame.WhichOneof("frame"):
                case "submit":
                    self._submit(frame.submit)
                case "abort":
                    for handle in frame.abort.handles:
                        self._abort(handle, Abort(0))
                case "stop_matched":
                    stop = frame.stop_matched
                    reason = FinishReason.STOP_STRING
                    self._abort(
                        stop.handle, Abort(0, reason, stop.completion_tokens, stop.stop_string)
                    )
                case "ping":
                    self._outlet.notify(Pong(frame.ping.nonce))
                case "hello":
                    raise FailedPrecondition("a session has one Hello, its first frame")
                case _:
                    raise Unsupported("this frame is empty or of a newer protocol", param="frame")
            await self._outlet.room(_MAX_UNREAD)

    def _submit(self, frame: Any) -> None:
        """A refused request ends in one Failed; the others of the stream are untouched."""
        handle, spec = frame.handle, frame.spec
        self._num_submits += 1
        try:
            if handle in self._keys:
                # Failed names a handle only: the client could not tell which of the two it means.
                self._desk.core.release(self._keys[handle])
                raise InvalidRequest(
                    f"handle {handle} is already in use; both requests are ended",
                    reason="DUPLICATE_HANDLE",
                    param="handle",
                )
            trace = (spec.traceparent, spec.tracestate)
            with self._desk.admitting(SPAN, trace):
                submit = to_submit(spec)
            self._keys[handle] = self._desk.submit(submit, self, handle, trace)
            self._ids[handle] = submit.request_id
        except ServiceError as error:
            self.failed(handle, error)
        except Exception as bug:  # the other requests of the stream are not to blame
            _LOG.exception("a request could not be read", extra={"request_id": spec.request_id})
            self.failed(handle, InternalError(f"internal error: {type(bug).__name__}: {bug}"))

    def _abort(self, handle: int, abort: Abort) -> None:
        """A handle that has ended, or never was, is ignored: aborts race with finishes."""
        key = self._keys.get(handle)
        if key is not None:
            self._desk.core.abort(abort._replace(key=key))

    async def _write(self) -> None:
        """The only writer of the stream; ends when the outlet is closed and empty."""
        write, most = self._stream.write, self._desk.config.max_message_bytes
        while items := await self._outlet.take():
            for item in items:
                if isinstance(item, StepRows):
                    for frame in step_frames(item, most):
                        await write(frame)
                else:
                    await write(notice_frame(item))

    def _forget(self, handle: int) -> None:
        self._keys.pop(handle, None)
        self._ids.pop(handle, None)

    def _close_when_done(self) -> None:
        if self._half_closed and not self._keys:
            self._outlet.close()

    def _release_all(self) -> None:
        for key in self._keys.values():
            self._desk.core.release(key)
        self._keys.clear()

    # ------------------------------------------------------------ Sink

    def step(self, rows: StepRows) -> None:
        self._outlet.put(rows)
        if rows.finished:
            for row, _ in rows.finished:
                self._forget(rows.handles[row])
            self._close_when_done()

    def failed(self, handle: int, error: ServiceError) -> None:
        self._forget(handle)
        self._outlet.notify(Failure(handle, error))
        self._close_when_done()

    # ------------------------------------------------------------ OpenSession

    def notify(self, notice: LoadReport | Draining) -> None:
        if isinstance(notice, LoadReport):
            notice = notice._replace(submits=self._num_submits)
        self._outlet.notify(notice)

    def close(self, error: ServiceError | None = None) -> None:
        """Everything that waits is still written, then the stream ends with `error`."""
        self._outlet.close(error)

    def abort_all(self) -> list[str]:
        """Aborts every live request of the session and returns their ids."""
        for key in self._keys.values():
            self._desk.core.abort(Abort(key))
        return sorted(set(self._ids.values()))
