"""The order of requests: higher priority first, then arrival; old ones before everything.

It does not know budgets or pages, only who goes before whom.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine_service.core.request import Request

Order = tuple[int, int, int, int]


def order(request: Request, aged_before_ns: int) -> Order:
    """Sort key, smallest first. Requests that arrived before `aged_before_ns` lead by arrival."""
    if request.arrival_ns < aged_before_ns:
        return (0, 0, request.arrival_ns, request.key)
    return (1, -request.priority, request.arrival_ns, request.key)


class WaitingQueue:
    """Requests without a row, kept sorted so that a step need not look at all of them."""

    def __init__(self) -> None:
        self._by_priority: list[tuple[int, int, int]] = []
        self._by_arrival: list[tuple[int, int]] = []
        self._requests: dict[int, Request] = {}
        self.num_tokens = 0
        """Committed tokens of all waiting requests."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Puts a request where its priority and arrival say."""
        self._requests[request.key] = request
        insort(self._by_priority, (-request.priority, request.arrival_ns, request.key))
        insort(self._by_arrival, (request.arrival_ns, request.key))
        self.num_tokens += len(request.committed)

    def remove(self, request: Request) -> None:
        """Takes a request out. O(log n) to find it."""
        del self._requests[request.key]
        by_priority = (-request.priority, request.arrival_ns, request.key)
        del self._by_priority[bisect_left(self._by_priority, by_priority)]
        del self._by_arrival[bisect_left(self._by_arrival, (request.arrival_ns, request.key))]
        self.num_tokens -= len(request.committed)

    def in_order(self, aged_before_ns: int) -> Iterator[Request]:
        """First those that arrived before `aged_before_ns`, then the rest by priority.

        The request that was just yielded may be removed meanwhile; nothing else may change.
        """
        num_aged = bisect_left(self._by_arrival, (aged_before_ns, -1))
        for _, key in self._by_arrival[:num_aged]:
            yield self._requests[key]
        index = 0
        while index < len(self._by_priority):
            entry = self._by_priority[index]
            if entry[1] >= aged_before_ns:
                yield self._requests[entry[2]]
            # A removed request's place is taken by the next one.
            if index < len(self._by_priority) and self._by_priority[index] is entry:
                index += 1
