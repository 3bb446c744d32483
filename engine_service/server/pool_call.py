"""One Pool call: a prompt in, a vector out.

It does not know the core's pipe.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from engine_service.core.messages import Finish, FinishReason, Submit
from engine_service.server.convert_pool import to_pool_response, to_pool_submit
from engine_service.server.desk import Desk
from engine_service.server.generation import is_late_ns
from engine_service.server.outlet import StepRows
from engine_service.server.request_trace import POOL_SPAN
from tidemill.runtime.errors import ServiceError


class PoolCall:
    """The sink of one prompt. Its loss aborts it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._ended: asyncio.Future[Finish | ServiceError] = (
            asyncio.get_running_loop().create_future()
        )

    async def run(self, request: Any, remaining_s: float | None) -> Any:
        """The response; raises the ServiceError that is the call's status."""
        trace = (request.traceparent, request.tracestate)
        with self._desk.admitting(POOL_SPAN, trace):
            self._desk.check_open()
            submit = to_pool_submit(request, remaining_s)
        return to_pool_response(await self.finish(submit, trace))

    async def finish(self, submit: Submit, trace: tuple[str, str]) -> Finish:
        """What ended the prompt; raises the ServiceError that is the call's status."""
        began_ns = time.monotonic_ns()
        key = self._desk.submit(submit, self, 0, trace)
        try:
            outcome = await self._ended
        finally:
            # gRPC cancels the call when its deadline passes: that is a DEADLINE, not an abort.
            late = is_late_ns(began_ns, submit.deadline_ns)
            reason = FinishReason.DEADLINE if late else FinishReason.ABORTED
            self._desk.core.release(key, reason)
        if isinstance(outcome, ServiceError):
            raise outcome
        return outcome

    # ------------------------------------------------------------ Sink

    def step(self, rows: StepRows) -> None:
        for _, finish in rows.finished:
            self._end(finish)

    def failed(self, handle: int, error: ServiceError) -> None:
        self._end(error)

    def _end(self, outcome: Finish | ServiceError) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)
