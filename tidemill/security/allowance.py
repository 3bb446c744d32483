"""Allowances: so much a minute for each name, saved up to one minute's worth, debts included.

Token buckets with the caller's clock. Libraries of rate limits count whole requests in windows;
what a generation costs is known when it ends, so here an allowance may fall below zero, and whoever
owes waits until it is paid. It does not know who asks for what.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

_MINUTE_S = 60.0
MAX_NAMES = 16_384


class _Bucket:
    """What one name has left, and when that was worked out."""

    __slots__ = ("at", "level")

    def __init__(self, level: float, at: float) -> None:
        self.level = level
        self.at = at


class Allowance:
    """`per_minute` units for every name; more than 0.

    Memory is bounded: at most `max_names` are remembered, those that were used last. Who used
    nothing for a minute is forgotten, which changes nothing for them. One event loop uses it.
    """

    def __init__(
        self, per_minute: int, clock: Callable[[], float], *, max_names: int = MAX_NAMES
    ) -> None:
        self.per_minute = per_minute
        self._rate = per_minute / _MINUTE_S
        self._clock = clock
        self._max_names = max_names
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, name: str, units: float = 1.0) -> float:
        """Seconds until `units` (at most a minute's worth) can be taken; 0: now."""
        return max(0.0, (units - self._bucket(name).level) / self._rate)

    def take(self, name: str, units: float) -> None:
        """Takes them, whether they are there or not."""
        self._bucket(name).level -= units

    def left(self, name: str) -> int:
        """Whole units that can be taken now."""
        return max(0, math.floor(self._bucket(name).level))

    def reset_s(self, name: str) -> float:
        """Seconds until nothing is missing."""
        return (self.per_minute - self._bucket(name).level) / self._rate

    def _bucket(self, name: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[name] = _Bucket(float(self.per_minute), now)
        else:
            self._fill(bucket, now)
            self._buckets.move_to_end(name)
        return bucket

    def _fill(self, bucket: _Bucket, now: float) -> None:
        level = bucket.level + max(0.0, now - bucket.at) * self._rate
        bucket.level, bucket.at = min(float(self.per_minute), level), now

    def _make_room(self, now: float) -> None:
        """Forgets the names that were used longest ago, as long as they miss nothing, and one more
        where there is no room."""
        while self._buckets:
            name, bucket = next(iter(self._buckets.items()))
            self._fill(bucket, now)
            if bucket.level < self.per_minute and len(self._buckets) < self._max_names:
                return
            del self._buckets[name]
