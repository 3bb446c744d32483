"""When requests must be over. It knows only their keys, and which of them are not over yet."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping


class Deadlines:
    """watch, due. Entries of ended requests stay until they are the majority, or due."""

    def __init__(self, live: Mapping[int, object]) -> None:
        self._live = live
        self._entries: list[tuple[int, int]] = []

    def watch(self, deadline_ns: int, key: int) -> None:
        """Takes a deadline down."""
        if len(self._entries) > 2 * len(self._live):
            self._entries = [entry for entry in self._entries if entry[1] in self._live]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (deadline_ns, key))

    def due(self, now_ns: int) -> Iterator[int]:
        """Live keys whose deadline has passed, each once."""
        while self._entries and self._entries[0][0] <= now_ns:
            _, key = heapq.heappop(self._entries)
            if key in self._live:
                yield key
