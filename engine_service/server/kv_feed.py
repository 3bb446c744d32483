"""What happened to the prefix index, numbered, for any number of readers at their own pace.

A reader is a number: where it is in the one ring. So a slow one costs nothing and holds up nobody;
what the ring has lost by then it makes up for with a snapshot. It does not know gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from engine_service.core.journal import CacheCleared, KvEvent, KvEvents
from tidemill.runtime.errors import ServiceError

RING_BATCHES, RING_UNITS = 10_000, 400_000
"""A batch is one engine step: at 100 steps a second a reader may stay away for over a minute. Long
prompts have hundreds of units a step, each with hash and tokens: about 120 bytes for 16 tokens."""
SNAPSHOT_EVENTS = 256
"""Events of one message of a snapshot."""


class KvBatch(NamedTuple):
    """Of one step, or a piece of a snapshot: the index as it was behind batch `seq`."""

    seq: int
    unix_s: float
    events: Sequence[KvEvent]
    gap: bool = False
    is_snapshot: bool = False


Shown = tuple[int, list[KvEvent]]
Snapshot = Callable[[Callable[[list[KvEvent]], Shown]], Awaitable[Shown]]


class Listener(Protocol):
    def __call__(self, batch: KvBatch) -> None: ...


class KvFeed:
    """publish, follow, listen. `snapshot` asks the core for its index; the first one makes it tell
    of changes, so before anybody follows they cost nothing."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._ring: deque[KvBatch] = deque()
        self._num_units = 0
        # Numbers go on from the clock: those of an engine that was started anew are never taken
        # for the numbers of the one before.
        self._next_seq = self.first_seq = time.time_ns() // 1000
        self._is_open = True
        self._error: ServiceError | None = None
        self._news = asyncio.Event()
        self._is_told = False
        self.listeners: list[Listener] = []
        """Told of every batch at once; they may not block."""

    def publish(self, told: KvEvents) -> None:
        """Appends a batch; the oldest go when the ring is full."""
        batch = KvBatch(self._next_seq, time.time(), told.events)
        self._next_seq += 1
        self._ring.append(batch)
        self._num_units += _num_units(batch)
        while len(self._ring) > RING_BATCHES or self._num_units > RING_UNITS:
            self._num_units -= _num_units(self._ring.popleft())
        for listener in self.listeners:
            listener(batch)
        self._wake()

    def close(self, error: ServiceError | None = None) -> None:
        """Ends all readers, with `error` if there is one."""
        self._is_open, self._error = False, error
        self._wake()

    async def listen(self, listener: Listener) -> None:
        """From here on `listener` is told of every batch, first of all what the index holds now."""

        def seen(events: list[KvEvent]) -> Shown:
            self._is_told = True
            if events:
                listener(KvBatch(self._next_seq - 1, time.time(), events))
            self.listeners.append(listener)
            return self._next_seq - 1, events

        await self._snapshot(seen)

    async def show(self) -> Shown:
        """The number of the last batch, and the index as it was behind it."""

        def seen(events: list[KvEvent]) -> Shown:
            self._is_told = True
            return self._next_seq - 1, events

        return await self._snapshot(seen)

    async def follow(self, start_seq: int) -> AsyncGenerator[KvBatch, None]:
        """Batches from `start_seq` on, for ever. What cannot be told any more is replaced by a
        snapshot, whose first piece says `gap`; so is everything for readers that begin at 0."""
        seq = start_seq
        while self._is_open:
            if not self._holds(seq):
                last_seq, events = await self.show()
                for piece in _pieces(last_seq, events):
                    yield piece
                seq = last_seq + 1
            elif seq == self._next_seq:
                await self._news.wait()
            else:
                yield self._ring[seq - self._next_seq]
                seq += 1
        if self._error is not None:
            raise self._error

    def _holds(self, seq: int) -> bool:
        return self._is_told and self._next_seq - len(self._ring) <= seq <= self._next_seq

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _num_units(batch: KvBatch) -> int:
    return sum(1 if isinstance(one, CacheCleared) else len(one.hashes) for one in batch.events)


def _pieces(seq: int, events: list[KvEvent]) -> list[KvBatch]:
    """At least one, so that a reader of an empty index knows that it is up to date."""
    now, size = time.time(), SNAPSHOT_EVENTS
    cuts = [events[at : at + size] for at in range(0, len(events), size)] or [[]]
    return [KvBatch(seq, now, cut, not number, True) for number, cut in enumerate(cuts)]
