"""What a routing policy sees: engines and a request as plain values, and how loaded an engine is.

It does not know connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

LOAD_CAP = 1.25
"""How much more than the mean an engine may have when something other than load speaks for it."""
_EASY_SHARE = 0.5
"""Of an engine's rows: with fewer in use nobody waits longer because a neighbour came too."""


class EngineView(NamedTuple):
    """One engine as its last report has it, and what this frontend did since.

    `sent` is the number of sequences sent less those that ended since the report, so it may be
    negative, or that of prompts which decode engines were told to fetch from there and the report
    does not know; `sent_tokens` are their prompts'. 0 for `max_rows`, `max_queued` and `kv_tokens`
    means that the engine did not say.
    """

    address: str
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_tokens_used: int = 0
    kv_tokens: int = 0
    max_rows: int = 0
    max_queued: int = 0
    sent: int = 0
    sent_tokens: int = 0

    @property
    def outstanding(self) -> int:
        """Sequences that run or wait there."""
        return max(0, self.running + self.waiting + self.sent)

    @property
    def queued(self) -> int:
        """Sequences that wait for a row there. What was sent takes free rows first."""
        free = max(0, self.max_rows - self.running) if self.waiting == 0 else 0
        return max(0, self.waiting + self.sent - min(free, max(0, self.sent)))

    @property
    def is_full(self) -> bool:
        """Whether it would refuse one more."""
        return 0 < self.max_queued <= self.queued

    @property
    def demand(self) -> float:
        """Shares of rows and of KV that are in use or wanted; 2 and more is a full engine."""
        rows = self.outstanding / max(1, self.max_rows)
        if not self.kv_tokens:
            return rows
        return (
            rows + (self.kv_tokens_used + self.waiting_tokens + self.sent_tokens) / self.kv_tokens
        )


class RequestView(NamedTuple):
    """One request. `number` counts the requests of this frontend, `session` names who belongs
    together ('' nobody), `hits` are the leading prompt tokens whose KV an engine has, by address.
    """

    number: int
    session: str = ""
    hits: Mapping[str, int] = {}


Policy = Callable[[Sequence[EngineView], RequestView], EngineView]
"""Chooses one of at least one engine; the same for the same values."""


def within_cap(engines: Sequence[EngineView]) -> list[EngineView]:
    """The engines that may be preferred for another reason than load: half empty, or at most
    LOAD_CAP times as busy as the mean with the new request. Never none of them."""
    share = LOAD_CAP * (sum(one.outstanding for one in engines) + 1) / len(engines)
    return [
        one for one in engines if one.outstanding < max(_EASY_SHARE * one.max_rows, share)
    ]  # fmt: skip
