"""When the readers of mailboxes are woken: in rounds, so that news merge where time is short.

Waking a reader costs a chunk of its stream: decoding, framing, a write. A process that must write
more chunks than it can would fall behind the engine without bound, because one message of the
engine wakes all readers before the next message is looked at. So after a round nobody is woken for
a quarter of the time that the round took, in which the session is read on: what has arrived by then
is delivered together, in fewer and larger chunks. A process with time to spare wakes at once. It
does not know mailboxes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_REST_SHARE = 0.25
_SHORTEST_REST_S = 0.001
"""What the timers of the event loop can tell apart."""

Wake = Callable[[], None]


class Rounds:
    """Calls what was put in, all at once, as soon as the last round and its rest are over.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._due: list[Wake] = []
        self._is_resting = False

    def put(self, wake: Wake) -> None:
        """`wake` is called with the next round, once for every time it was put in."""
        self._due.append(wake)
        if len(self._due) == 1 and not self._is_resting:
            # Behind the message that is being taken apart, so that a round has all of its rows.
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        began = time.monotonic()
        due, self._due = self._due, []
        self._is_resting = True
        for wake in due:
            wake()
        # Behind everyone who was woken.
        asyncio.get_running_loop().call_soon(self._rest, began)

    def _rest(self, began: float) -> None:
        rest_s = _REST_SHARE * (time.monotonic() - began)
        if rest_s < _SHORTEST_REST_S:
            self._end_rest()
        else:
            asyncio.get_running_loop().call_later(rest_s, self._end_rest)

    def _end_rest(self) -> None:
        self._is_resting = False
        if self._due:
            self._run()
