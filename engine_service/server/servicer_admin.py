"""AdminService, for operators, on a port of its own.

It does not know requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from engine_service.core.control import FlushCache, Pause, Resume, StopProfile
from engine_service.server import convert_admin as convert
from engine_service.server.desk import Desk
from tidemill.runtime.errors import DeadlineExceeded, Unsupported
from tidemill.runtime.rpc import abort, answering
from tidemill.v1 import engine_pb2_grpc

Handler = Callable[[Any, Any, Any], Awaitable[None]]


def _unserved(rpc: str, what: str) -> Handler:
    async def refuse(self: Any, request: Any, context: Any) -> None:
        await abort(context, Unsupported(f"AdminService.{rpc}: this engine does not serve {what}"))

    return refuse


class AdminServicer(engine_pb2_grpc.AdminServiceServicer):
    LoadAdapter = _unserved("LoadAdapter", "adapters: it has no LoRA layers yet")
    UnloadAdapter = _unserved("UnloadAdapter", "adapters: it has no LoRA layers yet")
    ListAdapters = _unserved("ListAdapters", "adapters: it has no LoRA layers yet")

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._num_pauses = 0

    async def FlushCache(self, request: Any, context: Any) -> Any:
        async with answering(context):
            self._desk.open_facts()
            return convert.flushed(await self._desk.core.asks.ask(FlushCache()))

    async def Drain(self, request: Any, context: Any) -> Any:
        """Answers when nothing runs any more, and the process ends as after SIGTERM."""
        async with answering(context):
            desk = self._desk
            limit_s = convert.drain_limit_s(request, desk.config.drain_timeout_s)
            desk.open_facts()
            desk.ask_to_stop(limit_s)
            await desk.drained.wait()
            if desk.num_cut_short:
                raise DeadlineExceeded(
                    f"{desk.num_cut_short} requests still ran after {desk.patience.seconds:g} s of "
                    "draining and are ended; allow more with timeout_ms",
                    reason="DRAIN_TIMEOUT",
                )
            if desk.core.lost is not None:  # nothing runs any more for that, too
                raise desk.core.lost
            return convert.drained()

    async def Pause(self, request: Any, context: Any) -> Any:
        async with answering(context):
            self._desk.open_facts()
            mode = convert.pause_mode(request)
            self._num_pauses += 1
            self._desk.board.pause(True)
            await self._desk.core.asks.ask(Pause(mode))
            return convert.paused()

    async def Resume(self, request: Any, context: Any) -> Any:
        async with answering(context):
            self._desk.open_facts()
            before = self._num_pauses
            await self._desk.core.asks.ask(Resume())
            if before == self._num_pauses:  # else the core is paused again behind this
                self._desk.board.pause(False)
            return convert.resumed()

    async def SetTraceLevel(self, request: Any, context: Any) -> Any:
        """From the next request and step on; INVALID_ARGUMENT for a level that does not exist."""
        async with answering(context):
            self._desk.open_facts()
            self._desk.observer.set_trace_level(request.level)
            return convert.traced()

    async def StartProfile(self, request: Any, context: Any) -> Any:
        async with answering(context):
            self._desk.open_facts()
            await self._desk.core.asks.ask(convert.start_profile(request))
            return convert.profile_started()

    async def StopProfile(self, request: Any, context: Any) -> Any:
        async with answering(context):
            self._desk.open_facts()
            return convert.profile_files(await self._desk.core.asks.ask(StopProfile()))
