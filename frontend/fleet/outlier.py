"""When an engine that keeps failing gets no requests for a while. It does not know engines.

One failure says little: the request may be at fault. Several in a row without a success between
them eject the engine, each time for twice as long; a success forgets everything. What was on its
way when the engine was ejected does not count: it failed for the same reason.
"""

from __future__ import annotations

_MOST_FAILURES = 5
_MOST_LOSSES = 2
"""Of the session. The first one may be the network's, and the engine is back before a client asks
again."""
_FIRST_S = 1.0
_LAST_S = 30.0


class Outlier:
    """Failures in a row of one engine. Times are seconds of one clock that never jumps."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._num_losses = 0
        self._next_s = _FIRST_S
        self._until = float("-inf")
        self.num_ejections = 0

    def is_ejected(self, now: float) -> bool:
        """Whether it gets no requests now."""
        return now < self._until

    def failed(self, now: float) -> None:
        """A request failed and the engine is to blame."""
        if self.is_ejected(now):
            return
        self._num_failures += 1
        if self._num_failures >= _MOST_FAILURES:
            self._eject(now)

    def lost(self, now: float) -> None:
        """An open session was lost, whatever number of requests with it."""
        if self.is_ejected(now):
            return
        self._num_losses += 1
        if self._num_losses >= _MOST_LOSSES:
            self._eject(now)

    def succeeded(self) -> None:
        """A request was answered."""
        self._num_failures = self._num_losses = 0
        self._next_s = _FIRST_S

    def _eject(self, now: float) -> None:
        self._until = now + self._next_s
        self._next_s = min(2 * self._next_s, _LAST_S)
        self._num_failures = self._num_losses = 0
        self.num_ejections += 1
