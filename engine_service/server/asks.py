"""What was asked of the core and is not answered yet. It does not know the pipe."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from engine_service.core.control import Answer, Ask, Control
from tidemill.runtime.errors import EngineDead, ServiceError

Seen = Callable[[Any], Any]
Undo = Callable[[Any], Control]


class Asks:
    """ask, settle, fail_all. Every ask ends in one value or one ServiceError."""

    def __init__(self, send: Callable[[Ask], None]) -> None:
        self._send = send
        self._tickets = itertools.count(1)
        self._open: dict[int, tuple[asyncio.Future[Any], Seen, Undo | None]] = {}

    async def ask(
        self, control: Control, seen: Seen = lambda value: value, *, undo: Undo | None = None
    ) -> Any:
        """The core's answer. `seen` is applied to it the moment it comes, ahead of later events;
        `undo` says what is asked then, if whoever asked has gone meanwhile."""
        ticket = next(self._tickets)
        future = asyncio.get_running_loop().create_future()
        self._open[ticket] = (future, seen, undo)
        try:
            self._send(Ask(ticket, control))
            return await future
        except asyncio.CancelledError:
            if undo is not None and not future.cancelled() and future.exception() is None:
                self.post(undo(future.result()))
            raise
        finally:
            if undo is None or not future.cancelled():  # else the answer is still to be undone
                self._open.pop(ticket, None)

    def post(self, control: Control) -> None:
        """Asks without wanting to know the answer; nothing where the core is gone."""
        with suppress(EngineDead):
            self._send(Ask(next(self._tickets), control))

    def settle(self, answer: Answer) -> None:
        """An answer that nobody waits for any more is dropped, or undone."""
        future, seen, undo = self._open.pop(answer.ticket, (None, None, None))
        if future is None or seen is None:
            return
        if future.cancelled() and undo is not None and answer.error is None:
            self.post(undo(answer.value))
        if future.done():
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(seen(answer.value))

    def fail_all(self, error: ServiceError) -> None:
        for future, *_ in self._open.values():
            if not future.done():
                future.set_exception(error)
        self._open.clear()
