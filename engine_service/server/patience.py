"""How long a process that drains waits for what still runs. It does not know what that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


class Patience:
    """allow, wait. All seconds count from when nothing new is taken any more."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = 0.0
        self._waiting: asyncio.Timeout | None = None
        self._is_over = False

    @property
    def seconds(self) -> float:
        """How long it lasts in all, to a hundredth."""
        return round(self._seconds, 2)

    def allow(self, seconds: float, *, only_less: bool) -> None:
        """From now on it lasts `seconds`. Where somebody allowed something before, and always while
        it waits, it can get shorter alone."""
        waiting = self._waiting
        if waiting is None:
            self._seconds = min(self._seconds, seconds) if only_less else seconds
        elif not (self._is_over or waiting.expired()):
            passed = asyncio.get_running_loop().time() - self._began
            self._seconds = min(self._seconds, passed + seconds)
            waiting.reschedule(self._began + self._seconds)

    async def wait(self, ends: Awaitable[None]) -> bool:
        """Whether it ended in time."""
        self._began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._seconds) as self._waiting:
                await ends
        except TimeoutError:
            return False
        finally:
            self._is_over = True
        return True
