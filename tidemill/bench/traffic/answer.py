"""What a client saw of one request. Times are CLOCK_MONOTONIC seconds, the same in all processes.

It does not know protocols.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

OK = "ok"
TIMEOUT = "timeout"
CONNECTION = "connection"
_REFUSALS = frozenset({"429", "503", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})


def _doubles() -> array.array[float]:
    return array.array("d")


@dataclass(slots=True)
class Answer:
    """Written by one connection while it lasts, read when the run is over."""

    due: float
    """When the request was to begin: all latencies count from here, so a generator that is late,
    or held up by the server it measures, cannot hide it (coordinated omission)."""
    begun: float = 0.0
    """When the generator got to it."""
    ended: float = 0.0
    status: str = ""
    """OK; an HTTP status or the name of a gRPC code; what an error inside a stream calls itself;
    TIMEOUT, CONNECTION."""
    said: str = ""
    """The server's words for a failure."""
    input_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them; the number of chunks where it does not."""
    chunks: array.array[float] = field(default_factory=_doubles)
    """When each chunk with text came."""
    was_moved: bool = False
    """Its first connection was refused, and it went to another address."""

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def is_refused(self) -> bool:
        """The server said that it has no room, before it did any work."""
        return self.status in _REFUSALS and not self.chunks

    @property
    def lag_s(self) -> float:
        """How late the generator itself was."""
        return self.begun - self.due

    @property
    def total_s(self) -> float:
        return self.ended - self.due

    @property
    def first_s(self) -> float:
        """To the first text; an answer without any has none before its end."""
        return (self.chunks[0] if self.chunks else self.ended) - self.due

    @property
    def per_token_s(self) -> float | None:
        """(last - first) / (tokens - 1); None where there is no second chunk."""
        if len(self.chunks) < 2 or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    def gaps_s(self) -> list[float]:
        """Between one chunk and the next."""
        return [then - now for now, then in pairwise(self.chunks)]

    def tokens_in(self, is_inside: Callable[[float], bool]) -> float:
        """Its tokens that came at such times, each chunk with the same share of them."""
        if not self.chunks:
            return float(self.output_tokens * is_inside(self.ended))
        return self.output_tokens * sum(map(is_inside, self.chunks)) / len(self.chunks)
