"""What clients may ask for again: kept in memory, bounded, under ids that name this frontend.

It does not know what it keeps.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from tidemill.runtime.errors import NotFound, Overloaded

_REPLICA_BYTES = 4
_ID_BYTES = 16
Kept = TypeVar("Kept")


def new_replica() -> str:
    """A name for this process that no other one has: 8 hexadecimal digits."""
    return secrets.token_hex(_REPLICA_BYTES)


class _Entry(NamedTuple, Generic[Kept]):
    kept: Kept
    num_bytes: int


class Shelf(Generic[Kept]):
    """The last `max_entries` things of one kind, of at most `max_bytes` together.

    What was not asked for longest goes first. What is not settled (still being made) stays, and
    nothing is opened any more when there is too much of it.
    """

    def __init__(
        self,
        kind: str,
        prefix: str,
        replica: str,
        *,
        max_entries: int,
        max_bytes: int,
        keep_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kind` is what errors call one of them, `prefix` begins its id. `keep_s` counts from the
        moment something is settled."""
        self._kind = kind
        self._prefix = prefix
        self._replica = replica
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._unsettled: dict[str, _Entry[Kept]] = {}
        self._settled: OrderedDict[str, _Entry[Kept]] = OrderedDict()  # least recently used first
        self._until: OrderedDict[str, float] = OrderedDict()  # of what is settled, oldest first
        self._num_unsettled_bytes = 0
        self._num_settled_bytes = 0
        digits = 2 * _REPLICA_BYTES, 2 * _ID_BYTES
        self._id = re.compile(rf"{prefix}_([0-9a-f]{{{digits[0]}}})[0-9a-f]{{{digits[1]}}}")

    def new_id(self) -> str:
        """An id that nobody can guess and from which every frontend can tell who holds it."""
        return f"{self._prefix}_{self._replica}{secrets.token_hex(_ID_BYTES)}"

    def check_room(self, num_entries: int, num_bytes: int) -> None:
        """Raises Overloaded when so much more cannot be opened. To be asked ahead of several things
        that belong together: those that gave way to the first ones do not come back."""
        used = self._num_unsettled_bytes
        has_room = len(self._unsettled) + num_entries <= self._max_entries
        if not has_room or used + num_bytes > self._max_bytes:
            raise Overloaded(
                f"{len(self._unsettled)} {self._kind}s ({used} bytes) are still being made; there "
                f"may be {self._max_entries} of together {self._max_bytes} bytes: try again later",
                retry_after_ms=1000,
            )

    def open(self, name: str, kept: Kept, num_bytes: int) -> None:
        """Keeps something that is still being made. Raises Overloaded when too much is."""
        self._drop(name)
        self.check_room(1, num_bytes)
        self._unsettled[name] = _Entry(kept, num_bytes)
        self._num_unsettled_bytes += num_bytes
        self._shrink()

    def settle(self, name: str, kept: Kept, num_bytes: int) -> None:
        """Keeps something that will not change any more, in the place of what `open` kept."""
        self._drop(name)
        self._settled[name] = _Entry(kept, num_bytes)
        self._until[name] = self._clock() + self._keep_s
        self._num_settled_bytes += num_bytes
        self._shrink()

    def get(self, name: str, *, param: str = "id") -> Kept:
        """What was kept. Raises NotFound saying where it is, or what may have become of it."""
        self._shrink()
        if name in self._unsettled:
            return self._unsettled[name].kept
        if name not in self._settled:
            raise self._missing(name, param)
        self._settled.move_to_end(name)
        return self._settled[name].kept

    def remove(self, name: str) -> Kept:
        """The same, and it is not kept any more."""
        kept = self.get(name)
        self._drop(name)
        return kept

    def _drop(self, name: str) -> None:
        if name in self._unsettled:
            self._num_unsettled_bytes -= self._unsettled.pop(name).num_bytes
        elif name in self._settled:
            self._num_settled_bytes -= self._settled.pop(name).num_bytes
            del self._until[name]

    def _shrink(self) -> None:
        """Drops what is too old, then the least recently used until the rest fits."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._drop(next(iter(self._until)))
        while self._settled and self._is_full:
            self._drop(next(iter(self._settled)))

    @property
    def _is_full(self) -> bool:
        num_entries = len(self._unsettled) + len(self._settled)
        num_bytes = self._num_unsettled_bytes + self._num_settled_bytes
        return num_entries > self._max_entries or num_bytes > self._max_bytes

    def _missing(self, name: str, param: str) -> NotFound:
        found = self._id.fullmatch(name)
        if found is not None and found[1] != self._replica:
            return NotFound(
                f"the {self._kind} {name} is held by the frontend {found[1]} and this is "
                f"{self._replica}: each keeps its own in memory. Ask that one; GET /health says "
                "who is who. If it was restarted, what it kept is gone",
                reason="HELD_BY_ANOTHER_FRONTEND",
                param=param,
            )
        age = "" if self._keep_s == float("inf") else f"longer ago than {self._keep_s:g} s, "
        return NotFound(
            f"there is no {self._kind} {name[:80]!r} in this frontend ({self._replica}): it was "
            f"never kept, {age}deleted, or dropped for newer ones (the last {self._max_entries} "
            f"are kept, of together {self._max_bytes} bytes)",
            param=param,
        )
