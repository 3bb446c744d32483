"""How far another host's monotonic clock is from this one's. It does not know what is timed."""

from __future__ import annotations

from collections import deque

_RECENT = 64
"""Messages; clocks drift apart by some milliseconds a minute."""


class OtherClock:
    """`behind_ns`: what to add to a time of the other host. Too much by what the quickest of its
    recent messages took on its way: less than a millisecond between hosts side by side."""

    def __init__(self) -> None:
        self._apart: deque[int] = deque(maxlen=_RECENT)

    def heard(self, told_ns: int, heard_ns: int) -> None:
        """A message left the other host at `told_ns` of its clock, and came at ours."""
        self._apart.append(heard_ns - told_ns)

    @property
    def behind_ns(self) -> int:
        return min(self._apart, default=0)
