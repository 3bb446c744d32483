"""One Generate call: n sequences of one request, one stream of responses tagged by index.

It does not know the core's pipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from engine_service.core.messages import Abort, FinishReason, Submit
from engine_service.server.convert import to_choices
from engine_service.server.convert_out import responses
from engine_service.server.desk import Desk
from engine_service.server.outlet import Failure, Outlet, StepRows
from engine_service.server.request_trace import SPAN
from tidemill.runtime.errors import ServiceError
from tidemill.runtime.rpc import is_late


def is_late_ns(began_ns: int, deadline_ns: int | None) -> bool:
    """is_late, now, by the monotonic clock."""
    deadline_s = None if deadline_ns is None else deadline_ns / 1e9
    return is_late(began_ns / 1e9, time.monotonic(), deadline_s)


class Generation:
    """The sequences of one call; a failing one ends the call and the others with it."""

    def __init__(self, desk: Desk, stream: Any) -> None:
        self._desk = desk
        self._stream = stream
        self._outlet = Outlet()
        self._keys: dict[int, int] = {}
        self._began_ns = 0
        self._deadline_ns: int | None = None

    async def run(self, request: Any) -> None:
        """Raises the ServiceError that is the call's status."""
        trace = (request.spec.traceparent, request.spec.tracestate)
        with self._desk.admitting(SPAN, trace):
            self._desk.check_open()
            submits = to_choices(request, self._stream.time_remaining())
        most = self._desk.config.max_message_bytes
        await self.serve(submits, trace, partial(responses, max_bytes=most))

    async def serve(
        self,
        submits: list[Submit],
        trace: tuple[str, str],
        answers: Callable[[StepRows], Iterable[Any]],
    ) -> None:
        """Starts the sequences, which are handles 0.. of the rows that `answers` turns into the
        messages of the stream. Raises the ServiceError that is the call's status."""
        try:
            self._start(submits, trace)
            while items := await self._outlet.take():
                for item in items:
                    if isinstance(item, Failure):
                        raise item.error
                    if isinstance(item, StepRows):
                        for response in answers(item):
                            await self._stream.write(response)
        finally:
            self._release_all()

    def stop(self, index: int, completion_tokens: int, text: str) -> None:
        """The output of a sequence ends behind `completion_tokens`, where its stop string `text`
        was found; its finish still comes."""
        key = self._keys.get(index)
        if key is not None:
            abort = Abort(key, FinishReason.STOP_STRING, completion_tokens, text)
            self._desk.core.abort(abort)

    def _start(self, submits: list[Submit], trace: tuple[str, str]) -> None:
        self._began_ns, self._deadline_ns = time.monotonic_ns(), submits[0].deadline_ns
        for index, submit in enumerate(submits):
            self._keys[index] = self._desk.submit(submit, self, index, trace)

    def _release_all(self) -> None:
        """gRPC cancels the call when its deadline passes: that is a DEADLINE, not an abort."""
        late = is_late_ns(self._began_ns, self._deadline_ns)
        reason = FinishReason.DEADLINE if late else FinishReason.ABORTED
        for key in self._keys.values():
            self._desk.core.release(key, reason)
        self._keys.clear()

    # ------------------------------------------------------------ Sink

    def step(self, rows: StepRows) -> None:
        self._outlet.put(rows)
        for row, _ in rows.finished:
            self._keys.pop(rows.handles[row], None)
        if not self._keys:
            self._outlet.close()

    def failed(self, handle: int, error: ServiceError) -> None:
        self._keys.pop(handle, None)
        self._outlet.notify(Failure(handle, error))
        self._outlet.close()
