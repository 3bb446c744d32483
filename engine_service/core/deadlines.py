"""When requests must be over: a heap that forgets those which are over already."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator


class Deadlines:
    """watch, due. Times are nanoseconds of any one clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []

    def watch(self, deadline_ns: int, key: int, live: Collection[int]) -> None:
        """Entries of keys that are not `live` stay until they are the majority, or due."""
        if len(self._heap) > 2 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_ns, key))

    def due(self, now: int) -> Iterator[int]:
        """Keys whose deadline has passed, once each."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
