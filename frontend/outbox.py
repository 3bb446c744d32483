"""What waits to be written to the engine: bounded, so that an engine that stops reading is noticed.

It does not know messages; it asks each for its size.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

from tidemill.runtime.errors import Overloaded

MAX_UNSENT_BYTES = 64 << 20
_OVERHEAD_BYTES = 4096
"""What a message costs beside its content: objects of its own, and of the request behind it."""
_RETRY_AFTER_MS = 1000


class Sized(Protocol):
    """What the outbox needs of a message."""

    def ByteSize(self) -> int: ...


Frame = TypeVar("Frame", bound=Sized)


class Outbox(Generic[Frame]):
    """A queue with one reader. `put` never waits and never fails: aborts must always get in."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[tuple[int, Frame]] = asyncio.Queue()
        self._num_bytes = 0

    def check_room(self) -> None:
        """Raises Overloaded when too much waits for another request to be added."""
        if self._num_bytes > MAX_UNSENT_BYTES:
            raise Overloaded(
                f"the engine does not read: {self._frames.qsize()} messages ({self._num_bytes} "
                f"bytes, the limit is {MAX_UNSENT_BYTES}) wait to be sent to it; try again shortly",
                reason="ENGINE_NOT_READING",
                retry_after_ms=_RETRY_AFTER_MS,
            )

    def put(self, frame: Frame) -> None:
        """Behind those that wait."""
        cost = frame.ByteSize() + _OVERHEAD_BYTES
        self._num_bytes += cost
        self._frames.put_nowait((cost, frame))

    async def get(self) -> Frame:
        """The oldest one, as soon as there is one."""
        cost, frame = await self._frames.get()
        self._num_bytes -= cost
        return frame
