"""Work that outlives the call that asked for it. It does not know what the work is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_LOG = logging.getLogger("tidemill.frontend")


class Background:
    """Running tasks by name; they end with the frontend at the latest."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which tells its failures to whoever asks for it."""
        task = asyncio.create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._ended)

    async def cancel(self, name: str) -> None:
        """Returns when the task of that name has ended; at once if there is none."""
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Cancels everything and waits for its end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task.get_name(), None)
        if not task.cancelled() and (failure := task.exception()) is not None:
            _LOG.error("work in the background failed", exc_info=failure)
