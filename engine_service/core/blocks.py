"""Which block of an answer a position is in. It does not know how blocks are decided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Blocks(NamedTuple):
    """Of one sequence, numbered from position `start` on: a model's own are counted from the
    prompt's first token, those that a request asks for from the one behind its prompt."""

    start: int
    size: int

    def at(self, position: int) -> int:
        return (position - self.start) // self.size

    def num_generated(self, prompt_len: int, output_tokens: int, pinned: Iterable[int]) -> int:
        """From the first token behind the prompt to the last generated one.

        `output_tokens` leaves out those at `pinned` positions, but they push generated ones back;
        those behind the last generated one are given, and nothing was computed for them.
        """
        stop = prompt_len + output_tokens
        for position in sorted(pinned):
            stop += position < stop
        return self.at(stop + self.size - 1) - self.at(prompt_len)
