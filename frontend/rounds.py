"""When the readers of mailboxes are woken: in rounds, so that news merge where time is short.

Waking a reader costs a chunk of its stream: decoding, framing, a write. A process that must write
more chunks than it can would fall behind the engine without bound, because one message of the
engine wakes all readers before the next message is looked at. So a round lasts until everyone who
was woken has written and waits again, and after it nobody is woken for a part of the time that
it took, in which the session is read on: what has arrived by then is delivered together, in fewer
and larger chunks. A process with time to spare wakes at once. It does not know mailboxes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

_REST_SHARE = 0.15
"""With a quarter, a process at half of its load was pushed into merging by its own rests."""
_SHORTEST_REST_S = 0.001
"""What the timers of the event loop can tell apart."""
_AT_ONCE = 8
"""Readers woken before the event loop looks at sockets again. A new request takes several turns of
the loop to begin, and gRPC accepts one call a turn: with 32, calls waited 0.6 s at full load."""
_LONGEST_ROUND_S = 0.05
"""Clients that do not read keep their stream's write from ending; the others go on without them."""


class Reader(Protocol):
    """Whoever waits for news."""

    def wake(self) -> bool:
        """News may be read now. Whether somebody waited for them, who then says `back`."""
        ...


class Rounds:
    """Wakes the readers that were put in, all at once, as soon as the last round and its rest are
    over.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._due: list[Reader] = []
        self._asleep: list[Reader] = []
        """Those whose turn in the round is still to come, the last one first."""
        self._at_work: set[Reader] = set()
        self._began = 0.0
        self._is_busy = False
        """A round is due, running or rests."""
        self._limit: asyncio.TimerHandle | None = None

    def put(self, reader: Reader) -> None:
        """`reader` is woken with the next round, once for every time it was put in."""
        self._due.append(reader)
        if not self._is_busy:
            # Behind the message that is being taken apart, so that a round has all of its rows.
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._run)

    def back(self, reader: Reader) -> None:
        """`reader` has dealt with its news, or never will. The last one ends the round."""
        if reader in self._at_work:
            self._at_work.discard(reader)
            self._check_end()

    def _run(self) -> None:
        self._began = time.monotonic()
        self._asleep, self._due = self._due[::-1], []
        self._limit = asyncio.get_running_loop().call_later(_LONGEST_ROUND_S, self._give_up)
        self._wake_some()

    def _wake_some(self) -> None:
        count = min(_AT_ONCE, len(self._asleep))
        woken = [self._asleep.pop() for _ in range(count)]
        self._at_work.update([reader for reader in woken if reader.wake()])
        if self._asleep:
            asyncio.get_running_loop().call_soon(self._wake_some)
        self._check_end()

    def _check_end(self) -> None:
        if not self._asleep and not self._at_work:
            self._rest()

    def _give_up(self) -> None:
        self._limit = None
        if self._asleep:  # the machine is slow, not a client
            self._limit = asyncio.get_running_loop().call_later(_LONGEST_ROUND_S, self._give_up)
            return
        self._at_work = set()
        self._rest()

    def _rest(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        rest_s = _REST_SHARE * (time.monotonic() - self._began)
        loop = asyncio.get_running_loop()
        if rest_s < _SHORTEST_REST_S:
            # Behind those who read on: the round is over for all of them.
            loop.call_soon(self._end_rest)
        else:
            loop.call_later(rest_s, self._end_rest)

    def _end_rest(self) -> None:
        self._is_busy = bool(self._due)
        if self._due:
            self._run()
