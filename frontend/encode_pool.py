"""Threads on which texts are encoded, so that streams go on meanwhile.

It does not know tokenizers or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tidemill.runtime.errors import Overloaded

SHORT_CHARS = 2000
"""Texts up to this length are encoded in place, in at most 0.5 ms: a busy event loop makes a
thread wait 5 ms for the interpreter lock, several times (256 streams opened at once on two cores:
3.0 s to the last first token through threads, 0.5 s in place)."""
LONG_CHARS = 64_000
"""Longer texts have a thread of their own: they take up to seconds, and others do not wait for
them."""
MOST_WAITING_CHARS = 16_000_000
"""On each thread, that of the text being encoded included; about as many seconds as megabytes."""
Result = TypeVar("Result")


class EncodePool:
    """Two threads, one for long texts and one for the rest.

    Tokenizers release the interpreter lock while they encode, so both cores of a small machine are
    busy; more threads would only take time from the event loop.
    """

    def __init__(self) -> None:
        self._lanes = [_Lane("encode"), _Lane("encode-long")]
        self._num_here = 0
        """Characters encoded in place since the event loop looked at others."""

    async def run(
        self, work: Callable[..., Result], *args: Any, size: int | None = None, **kwargs: Any
    ) -> Result:
        """The result of `work`; `size` is the length of its text, None keeps it off the loop.

        What is cancelled before its turn is never begun. Raises Overloaded when too much waits.
        """
        if size is not None and size <= SHORT_CHARS:
            await self._give_way(size)
            return work(*args, **kwargs)
        lane = self._lanes[(size or 0) > LONG_CHARS]
        return await lane.run(partial(work, *args, **kwargs), size or 0)

    async def _give_way(self, size: int) -> None:
        """Others have their turn between many short texts: one request may hold a thousand."""
        if not self._num_here:
            asyncio.get_running_loop().call_soon(self._looked)
        self._num_here += size
        if self._num_here > SHORT_CHARS:
            await asyncio.sleep(0)

    def _looked(self) -> None:
        self._num_here = 0

    def close(self) -> None:
        """Drops what has not begun; idempotent."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """One thread and what waits for it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._num_chars = 0

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """The result of `work`, in its turn; a text alone is taken whatever its size."""
        if self._num_chars and self._num_chars + size > MOST_WAITING_CHARS:
            raise Overloaded(
                f"{self._num_chars:,} characters of other requests wait to be tokenized, and with "
                f"{size:,} more they would be over {MOST_WAITING_CHARS:,}; try again shortly",
                reason="TOKENIZER_BUSY",
                retry_after_ms=1000,
            )
        self._num_chars += size
        future = self._thread.submit(work)
        # Counted until the thread is done with it, which may be after its client has left.
        loop = asyncio.get_running_loop()

        def through(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody counts any more
                loop.call_soon_threadsafe(self._forget, size)

        future.add_done_callback(through)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self, size: int) -> None:
        self._num_chars -= size
