"""The order of requests: old ones, then higher priority, then the key that was served least.

Within a key they go by arrival, so a single tenant has first come, first served. It does not know
budgets or pages, only who goes before whom.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from engine_service.core.policy.served import Served
from engine_service.core.request import Request

Place = tuple[int, int]
"""(arrival, key of the request)."""
Rank = tuple[int, int, int, int, int]

MAX_IDLE_LEVELS = 64
"""Priorities without requests whose counters are remembered."""


class _Level:
    """Waiting requests that only fairness tells apart: a line of places for every key.

    Counters only grow, so the heap is put right lazily: an entry is a lower bound.
    """

    def __init__(self) -> None:
        self.served = Served()
        self.lines: dict[str, list[Place]] = {}
        self._heap: list[tuple[int, Place, str]] = []
        self._listed: dict[str, tuple[int, Place, str]] = {}
        self._passed: list[str] = []
        """Keys that the look at hand is done with; not in the heap."""
        self._last: str | None = None
        """The key that waited last."""
        self.num_waiting = 0

    def add(self, key: str, place: Place) -> None:
        self._restore()
        line = self.lines.get(key)
        if line is None:
            if not self.served.knows_nobody_but(key):
                first = self._first()
                if first is None:  # not "": that is everybody who names no key
                    first = self._last
                least = None if first is None else self.served.of(first)
                self.served.lift(key, least, self.lines)
            line = self.lines[key] = []
        insort(line, place)
        self.num_waiting += 1
        if line[0] is place:
            self._list(key)

    def remove(self, key: str, place: Place) -> None:
        line = self.lines[key]
        del line[bisect_left(line, place)]
        self.num_waiting -= 1
        if not line:
            del self.lines[key]
            self._listed.pop(key, None)
            self._last = key

    def in_order(self) -> Iterator[Place]:
        """Each place once. The one just yielded may be removed, and its key be charged."""
        self._restore()
        looked_at: dict[str, int] = {}
        while (key := self._first()) is not None:
            line, index = self.lines[key], looked_at.get(key, 0)
            while index < len(line):
                place = line[index]
                yield place
                if index >= len(line) or line[index] is not place:
                    break  # it was taken: another key may have been served less now
                index += 1
            looked_at[key] = index
            if line and index >= len(line):
                del self._listed[key]
                self._passed.append(key)

    def _first(self) -> str | None:
        """The listed key that was served least; of equal ones the one that waits longest."""
        heap, listed = self._heap, self._listed
        if len(listed) == 1:
            return next(iter(listed))
        while heap:
            entry = heap[0]
            key = entry[2]
            if listed.get(key) is not entry:
                heapq.heappop(heap)
                continue
            now = self._entry(key)
            if now == entry:
                return key
            listed[key] = now
            heapq.heapreplace(heap, now)
        return None

    def _entry(self, key: str) -> tuple[int, Place, str]:
        return (self.served.of(key), self.lines[key][0], key)

    def _list(self, key: str) -> None:
        entry = self._listed[key] = (self.served.least(key), self.lines[key][0], key)
        if len(self._heap) > 2 * len(self._listed):
            self._heap = list(self._listed.values())  # what was listed anew is in it for nothing
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def _restore(self) -> None:
        passed, self._passed = self._passed, []
        for key in passed:
            if key in self.lines and key not in self._listed:
                self._list(key)


class FairQueue:
    """Requests without a row, and what each key was served. add, remove, start, stop, in_order.

    What is asked of it in a step costs O(log n) for each request that moves, and a look at the
    running requests of the keys at the front.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        """Of all levels, negative: the most urgent first."""
        self._aged = _Level()
        self._level_of: dict[int, _Level] = {}
        """By request key; running ones stay where they started."""
        self._young: list[Place] = []
        self._requests: dict[int, Request] = {}
        self.num_tokens = 0
        """Committed tokens of all waiting requests."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Puts a request where its priority, key and arrival say."""
        self._requests[request.key] = request
        self.num_tokens += len(request.committed)
        insort(self._young, _place(request))
        self._put(request, self._level(request.priority))

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        del self._requests[request.key]
        self.num_tokens -= len(request.committed)
        level = self._level_of.pop(request.key)
        if level is not self._aged:
            del self._young[bisect_left(self._young, _place(request))]
        level.remove(request.fairness_key, _place(request))

    def start(self, request: Request, num_prompt_tokens: int) -> None:
        """A waiting request takes a row: its key is charged for these tokens now."""
        level = self._level_of[request.key]
        self.remove(request)
        self._level_of[request.key] = level
        level.served.start(request, num_prompt_tokens)

    def stop(self, request: Request) -> None:
        """A request that was started gives its row back."""
        self._level_of.pop(request.key).served.stop(request)

    def in_order(self, aged_before_ns: int) -> Iterator[Request]:
        """First those that arrived before `aged_before_ns`, then the rest by priority; keys share.

        The request that was just yielded may be started or removed meanwhile; nothing else may
        change.
        """
        self._age(aged_before_ns)
        yield from [] if not self._aged.lines else self._yield(self._aged)
        for negative in list(self._priorities):
            level = self._levels[-negative]
            if level.lines:
                yield from self._yield(level)

    def num_ahead(self, priority: int, key: str) -> int:
        """How many waiting requests a new one of this key would find before it.

        Keys take turns: whoever has few requests passes those who have many. O(priorities).
        """
        ahead = self._aged.num_waiting
        for negative in self._priorities:
            level = self._levels[-negative]
            if -negative > priority:
                ahead += level.num_waiting
            elif -negative == priority:
                rounds = len(level.lines.get(key, ())) + 1
                num_keys = len(level.lines) + (key not in level.lines)
                ahead += min(level.num_waiting, rounds * num_keys - 1)
        return ahead

    def expendable(self, priority: int, key: str) -> Request | None:
        """Whom a full queue gives up for a new request of this key: the youngest of the key that
        has most waiting, at a lower priority, or at its own if that key has two more than it.

        None: nobody. Requests that ran already are never given up. O(keys) of one priority.
        """
        used = [p for p in self._priorities if self._levels[-p].lines]
        if not used or -used[-1] > priority:
            return None
        lines = self._levels[-used[-1]].lines
        longest = max(lines, key=lambda name: (len(lines[name]), name))
        own = len(lines.get(key, ()))
        if -used[-1] == priority and len(lines[longest]) < own + 2:
            return None
        found = self._requests[lines[longest][-1][1]]
        return found if found.started_ns is None else None

    def ranking(self, aged_before_ns: int) -> Callable[[Request], Rank]:
        """A sort key for running requests, the least entitled to its pages last; for one moment."""
        ahead: dict[tuple[int, str], int] = {}
        levels = {id(level): level for level in self._level_of.values()}
        is_shared = len({key for one in levels.values() for key in one.served.running_keys}) > 1

        def rank(request: Request) -> Rank:
            level, key = self._level_of[request.key], request.fairness_key
            if is_shared and (id(level), key) not in ahead:
                ahead[id(level), key] = level.served.ahead(key)
            arrival, is_aged = request.arrival_ns, request.arrival_ns < aged_before_ns
            more = ahead.get((id(level), key), 0)
            if is_aged:
                return (0, 0, more, arrival, request.key)
            return (1, -request.priority, more, arrival, request.key)

        return rank

    def _yield(self, level: _Level) -> Iterator[Request]:
        for _, key in level.in_order():
            yield self._requests[key]

    def _age(self, aged_before_ns: int) -> None:
        num_aged = bisect_left(self._young, (aged_before_ns, -1))
        for place in self._young[:num_aged]:
            request = self._requests[place[1]]
            self._level_of[request.key].remove(request.fairness_key, place)
            self._put(request, self._aged)
        del self._young[:num_aged]

    def _put(self, request: Request, level: _Level) -> None:
        self._level_of[request.key] = level
        level.add(request.fairness_key, _place(request))

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            self._forget_levels()
            level = self._levels[priority] = _Level()
            insort(self._priorities, -priority)
        return level

    def _forget_levels(self) -> None:
        idle = [p for p, one in self._levels.items() if not one.lines and not one.served]
        for priority in idle[: max(0, len(idle) - MAX_IDLE_LEVELS)]:
            del self._levels[priority]
            self._priorities.remove(-priority)


def _place(request: Request) -> Place:
    return (request.arrival_ns, request.key)
