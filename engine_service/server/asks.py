"""What was asked of the core and is not answered yet. It does not know the pipe."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from engine_service.core.control import Answer, Ask, Control
from tidemill.runtime.errors import ServiceError

Seen = Callable[[Any], Any]


class Asks:
    """ask, settle, fail_all. Every ask ends in one value or one ServiceError."""

    def __init__(self, send: Callable[[Ask], None]) -> None:
        self._send = send
        self._tickets = itertools.count(1)
        self._open: dict[int, tuple[asyncio.Future[Any], Seen]] = {}

    async def ask(self, control: Control, seen: Seen = lambda value: value) -> Any:
        """The core's answer. `seen` is applied to it the moment it comes, ahead of later events."""
        ticket = next(self._tickets)
        future = asyncio.get_running_loop().create_future()
        self._open[ticket] = (future, seen)
        try:
            self._send(Ask(ticket, control))
            return await future
        finally:
            self._open.pop(ticket, None)

    def settle(self, answer: Answer) -> None:
        """An answer that nobody waits for any more is dropped."""
        future, seen = self._open.get(answer.ticket, (None, None))
        if future is None or seen is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(seen(answer.value))

    def fail_all(self, error: ServiceError) -> None:
        for future, _ in self._open.values():
            if not future.done():
                future.set_exception(error)
