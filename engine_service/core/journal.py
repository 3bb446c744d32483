"""What the prefix index holds, unit by unit, and what changed in it since somebody last asked.

A unit is lcm(page_size, mask_block) tokens: less than that can never be reused, so that is what
routers are told, under the digests of core/pages.py. It does not know pages by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, cast


class PagesStored(NamedTuple):
    """Units that can be reused now, each the prefix of the next."""

    hashes: tuple[bytes, ...]
    parent: bytes
    """The unit before the first of them; empty: there is none."""
    token_ids: bytes
    """Of all of them, little-endian uint32."""
    unit: int
    """Tokens of one of them."""
    salt: str


class PagesRemoved(NamedTuple):
    hashes: tuple[bytes, ...]


class CacheCleared(NamedTuple):
    """Nothing can be reused any more."""


KvEvent = PagesStored | PagesRemoved | CacheCleared


class KvEvents(NamedTuple):
    """What one turn of the loop changed, in order. `step`: how many had been collected by then."""

    step: int
    events: list[KvEvent]


class _Unit:
    __slots__ = ("num_pages", "stored", "whole")

    def __init__(self, stored: PagesStored, whole: int) -> None:
        self.stored = stored
        self.whole = whole
        self.num_pages = 0


class Journal:
    """index, evict, clear, snapshot, take. Only PageManager writes it.

    A unit of several pages counts from its last page on, until the first one is evicted. Events are
    kept from the first snapshot on; before it nobody listens.
    """

    def __init__(self) -> None:
        self._units: dict[bytes, _Unit] = {}
        self._events: list[KvEvent] = []
        self._is_heard = False

    def index(self, digest: bytes, num_pages: int, stored: PagesStored, whole: int) -> None:
        """So many pages of a unit, which has `whole`, entered the index."""
        unit = self._units.get(digest)
        if unit is None:
            unit = self._units[digest] = _Unit(stored, whole)
        unit.num_pages += num_pages
        if unit.num_pages == whole and self._is_heard:
            self._events.append(stored)

    def evict(self, digest: bytes) -> None:
        """A page of a unit left the index."""
        unit = self._units[digest]
        if unit.num_pages == unit.whole and self._is_heard:
            self._events.append(PagesRemoved((digest,)))
        unit.num_pages -= 1
        if not unit.num_pages:
            del self._units[digest]

    def clear(self) -> None:
        """Everything left the index."""
        self._units = {}
        if self._is_heard:
            self._events.append(CacheCleared())

    def snapshot(self) -> list[KvEvent]:
        """All units that can be reused, as events that make them known. O(index).

        Take what happened before first: it is in the snapshot.
        """
        self._is_heard = True
        return [unit.stored for unit in self._units.values() if unit.num_pages == unit.whole]

    def take(self) -> list[KvEvent]:
        """What happened since the last call; nothing before the first snapshot."""
        events, self._events = self._events, []
        return _joined(events)


def _joined(events: Sequence[KvEvent]) -> list[KvEvent]:
    """Units of one sequence that are stored one behind the other travel together, and so do those
    that are removed. O(events): joined one by one, as they come, all before them would be copied
    for each, and a step of a long prompt stores thousands of small pages."""
    runs: list[list[KvEvent]] = []
    for event in events:
        if runs and _goes_on(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _goes_on(last: KvEvent, event: KvEvent) -> bool:
    if isinstance(event, PagesStored):
        return isinstance(last, PagesStored) and last.hashes[-1] == event.parent
    return isinstance(event, PagesRemoved) and isinstance(last, PagesRemoved)


def _as_one(run: Sequence[KvEvent]) -> KvEvent:
    """Of one kind, which has hashes."""
    several = cast("Sequence[PagesStored | PagesRemoved]", run)
    hashes = tuple(chain.from_iterable(one.hashes for one in several))
    stored = [one for one in several if isinstance(one, PagesStored)]
    if not stored:
        return PagesRemoved(hashes)
    return stored[0]._replace(hashes=hashes, token_ids=b"".join(one.token_ids for one in stored))
