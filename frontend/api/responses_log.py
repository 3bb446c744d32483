"""The events of a response in the background: kept, so that they can be read from any of them on.

It does not know what they mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

_END = b"\n\n"


class EventLog:
    """Written by one task, read by any number, also after it is closed."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_closed = False
        self._news = asyncio.Event()
        self.num_bytes = 0

    def add(self, events: bytes) -> None:
        """One or several whole events; JSON has no bare line break, so a blank line ends each."""
        self._events += [event + _END for event in events.split(_END)[:-1]]
        self.num_bytes += len(events)
        self._wake()

    def close(self) -> None:
        """Nothing follows."""
        self._is_closed = True
        self._wake()

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """Event number `start` and all that follow it, as they come, until the log is closed."""
        while True:
            news = self._news
            if start < len(self._events):
                unread, start = self._events[start:], len(self._events)
                yield b"".join(unread)
            elif self._is_closed:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
