"""What a prefill engine was picked for, and its load report cannot know yet.

A pick comes there through a decode engine, on no session of ours, so no report says how many of
them it counts; it counts those that had the time to arrive. It does not know requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

_TOKEN_BYTES = 4
ON_THE_WAY_S = 0.25
"""A report may have crossed picks that are younger than this. Engines report as often while
something changes, so a pick counts twice in one report at most."""


class PrefillPicks:
    """add, unknown. Of one engine; times are those of the running loop, in seconds."""

    def __init__(self) -> None:
        self._unknown: dict[int, tuple[float, int, int]] = {}
        """When, prompts and tokens; in the order in which they were picked."""
        self._numbers = itertools.count()
        self._num_prompts = self._num_tokens = 0

    def add(self, prompts: Collection[bytes], now: float) -> Callable[[], None]:
        """The engine was picked for so many packed prompts. What is returned is called when they
        are computed, or will not be; it may be called again."""
        number = next(self._numbers)
        num_tokens = sum(map(len, prompts)) // _TOKEN_BYTES
        self._unknown[number] = (now, len(prompts), num_tokens)
        self._num_prompts += len(prompts)
        self._num_tokens += num_tokens
        return lambda: self._forget(number)

    def unknown(self, reported_at: float) -> tuple[int, int]:
        """(prompts, tokens) that the last report, of that time, does not count."""
        while self._unknown:
            number, (picked_at, *_) = next(iter(self._unknown.items()))
            if picked_at + ON_THE_WAY_S > reported_at:
                break
            self._forget(number)
        return self._num_prompts, self._num_tokens

    def _forget(self, number: int) -> None:
        _, num_prompts, num_tokens = self._unknown.pop(number, (0.0, 0, 0))
        self._num_prompts -= num_prompts
        self._num_tokens -= num_tokens
