"""How long another process has shown no sign of life. It does not know what to do about it."""

from __future__ import annotations

TICK_S = 0.25
"""A thread of every rank that does nothing else beats this often, so a long step, or a wait for
another rank, is no silence; a process that is stopped, or whose interpreter is held, is."""

SERVING_S = 2.5
"""Most silence of a rank that serves: with what follows, the group has ended within 5 s, also on a
machine that is busy otherwise."""

LOADING_S = 120.0
"""While it loads: libraries and files on slow disks are read with the interpreter held."""

CUT_S = 10.0
"""Of the two processes that only pass on what ranks of different hosts say, whatever these do."""


class Silence:
    """`seconds` since the last new beat, counted while this process itself was awake: whoever was
    stopped together with the other (a paused machine, a starved one) accuses nobody."""

    def __init__(self) -> None:
        self._beat = -1
        self._serves = False
        self.seconds = 0.0

    def look(self, beat: int, elapsed_s: float, *, serves: bool) -> None:
        """`elapsed_s` since the last look, of which no more than two ticks count. What was silence
        while it loaded says nothing about a rank that serves."""
        if beat != self._beat or serves != self._serves:
            self._beat, self._serves, self.seconds = beat, serves, 0.0
        else:
            self.seconds += min(elapsed_s, 2 * TICK_S)

    @property
    def is_long(self) -> bool:
        """Whether it is more than a rank that lives would keep."""
        return self.seconds > (SERVING_S if self._serves else LOADING_S)
