"""What each fairness key was served: virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2. A prompt counts
when its request starts, an output token when it is out. It does not know queues or rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine_service.core.request import Request

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""What a token counts; the paper's weights. A generated token costs a step, a prompt's a part."""

MAX_IDLE_KEYS = 4096
"""Keys without requests that are remembered, at least as long as they owe something."""


class _Running:
    """Requests of one key that run. Their tokens are counted with one call a request, because
    there may be a thousand of them; those that compute again what was told once are few."""

    __slots__ = ("num_settled", "redone", "settled", "tokens")

    def __init__(self) -> None:
        self.settled: dict[int, int] = {}
        """How many tokens of each request are settled."""
        self.num_settled = 0
        self.tokens: dict[int, list[int]] = {}
        self.redone: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        told = num_told(request)
        self.settled[request.key] = told
        self.num_settled += told
        if told > len(request.committed):
            self.redone[request.key] = request
        else:
            self.tokens[request.key] = request.committed

    def remove(self, request: Request) -> int:
        """How many of its tokens are not settled."""
        key = request.key
        settled = self.settled.pop(key)
        self.num_settled -= settled
        if self.redone.pop(key, None) is None:
            del self.tokens[key]
        return num_told(request) - settled

    @property
    def num_owed(self) -> int:
        """Tokens that are not settled. O(requests)."""
        told = sum(map(len, self.tokens.values())) + sum(map(num_told, self.redone.values()))
        return told - self.num_settled


class Served:
    """lift, start, stop, of. The counters of one level of priority, in weighted tokens.

    What running requests put out is not added up step by step but looked up when somebody asks.
    """

    def __init__(self) -> None:
        self._settled: dict[str, int] = {}
        self._running: dict[str, _Running] = {}
        self._floor = 0
        """No key that begins to wait has less."""

    def __bool__(self) -> bool:
        """Whether anything runs that is charged here."""
        return bool(self._running)

    @property
    def running_keys(self) -> Iterable[str]:
        """Keys with requests that run."""
        return self._running.keys()

    def knows_nobody_but(self, key: str) -> bool:
        """Whether nothing was ever charged to another key: then no counter is ever compared."""
        return len(self._settled) == 1 and key in self._settled

    def least(self, key: str) -> int:
        """What the key was served at least. O(1)."""
        return self._settled.get(key, self._floor)

    def of(self, key: str) -> int:
        """What the key was served. O(requests of the key that run)."""
        running = self._running.get(key)
        owed = 0 if running is None else running.num_owed
        return self.least(key) + OUTPUT_WEIGHT * owed

    def ahead(self, key: str) -> int:
        """How far the key is ahead of the one that was served least."""
        return self.of(key) - self._floor

    def lift(self, key: str, least: int | None, waiting: Collection[str] = ()) -> None:
        """The key begins to wait: time in which it asked for nothing earns it nothing.

        `least`: the smallest counter among the keys that wait already; of the one that waited last
        where none does. None: nobody ever did. `waiting` are keys that must not be forgotten.
        """
        if least is not None:
            self._floor = max(self._floor, least)
        self._settled[key] = self._settled.get(key, 0)
        self._settled[key] += max(0, self._floor - self.of(key))
        if len(self._settled) > 2 * (MAX_IDLE_KEYS + len(self._running) + len(waiting)):
            self._forget(key, waiting)

    def start(self, request: Request, num_prompt_tokens: int) -> None:
        """A request takes a row; `num_prompt_tokens` of it have never been computed for it."""
        key = request.fairness_key
        self._settled[key] = self.least(key) + PROMPT_WEIGHT * num_prompt_tokens
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _Running()
        running.add(request)

    def stop(self, request: Request) -> None:
        """A request gives its row back."""
        key = request.fairness_key
        running = self._running[key]
        self._settled[key] += OUTPUT_WEIGHT * running.remove(request)
        if not running.settled:
            del self._running[key]

    def _forget(self, but: str, waiting: Collection[str]) -> None:
        """Keys that owe nothing come back as new ones; of the others those who owe most stay."""
        kept = {but, *self._running}
        idle = [key for key in self._settled if key not in kept and key not in waiting]
        idle.sort(key=self._settled.__getitem__)
        for key in idle[: max(0, len(idle) - MAX_IDLE_KEYS)]:
            del self._settled[key]


def num_told(request: Request) -> int:
    """Tokens of prompt and output so far; what a restart gives up stays told."""
    return max(request.told_len, len(request.committed))
