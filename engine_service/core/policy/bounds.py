"""How long the queue may grow, and what a caller is told who finds it full.

A bound by number protects memory; what keeps the time to the first token flat under overload is a
bound on the time a newcomer would wait, which follows from how long requests stay. It does not know
requests one by one.
"""

from __future__ import annotations

from typing import NamedTuple

from tidemill.runtime.errors import Overloaded

_SHARE_OF_NEWEST = 1 / 32
"""How much one stay counts in the mean: what changes shows within a few dozen requests."""
_WAVE_NS, _MOST_OF_WAVE, _MOST_MEANS = 10_000_000, 4, 2
"""Of rows that callers give up within so many nanoseconds so many count, and none for more than so
many means. So a wave that is as short moves a mean of 32 stays or more by 13 % up or 12 % down at
most; a younger mean further, as each stay is a larger share of it. A longer wave counts again every
so many nanoseconds."""
_LEAST_RETRY_S, _MOST_RETRY_S, _UNKNOWN_RETRY_S = 0.1, 30.0, 1.0


class QueueLimits(NamedTuple):
    """Requests, their tokens, and seconds; a limit of 0 seconds is none."""

    max_requests: int
    max_tokens: int
    max_delay_s: float


class Found(NamedTuple):
    """What a newcomer finds: the whole queue, whom it would wait for, and who runs."""

    num_waiting: int
    num_tokens: int
    num_ahead: int
    num_running: int


class QueueBounds:
    """note, check. Little's law: rows that turn over every `stay` serve num_running / stay requests
    a second, whether rows, pages or the budget of a step is what they wait for."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._stay_ns: float | None = None
        self._num_noted = 0
        self._wave_ns, self._num_in_wave = -_WAVE_NS, 0

    def note(self, stay_ns: int, now_ns: int, *, is_given_up: bool) -> None:
        """A request gave its row back for good, so long after it got it.

        Whoever waits gets rows that others gave up as well as those that are done with, so both
        count: a mean of finished stays alone is several times too long where callers leave early.
        But a wave of them has one cause (a client that leaves with all that it has, a proxy that
        restarts) and says little of the rows behind it.
        """
        mean_ns: float = stay_ns if self._stay_ns is None else self._stay_ns
        if is_given_up:
            if now_ns - self._wave_ns >= _WAVE_NS:
                self._wave_ns, self._num_in_wave = now_ns, 0
            self._num_in_wave += 1
            if self._num_in_wave > _MOST_OF_WAVE:
                return
            stay_ns = min(stay_ns, round(_MOST_MEANS * mean_ns))
        self._num_noted += 1
        share = max(_SHARE_OF_NEWEST, 1 / self._num_noted)
        self._stay_ns = mean_ns + share * (stay_ns - mean_ns)

    def wait_s(self, num_ahead: int, num_running: int) -> float | None:
        """How long whoever is behind `num_ahead` requests will wait for a row; None: not known."""
        if self._stay_ns is None or not num_running:
            return None
        return num_ahead * self._stay_ns / num_running / 1e9

    def check(self, found: Found, num_new_tokens: int) -> None:
        """Raises Overloaded with a time to retry after. An empty queue takes everybody."""
        limits = self.limits
        if not found.num_waiting:
            return
        if found.num_waiting >= limits.max_requests:
            raise self.refusal(
                f"{limits.max_requests} requests are waiting, which is the limit "
                "(--max-queued-requests)",
                found,
            )
        if found.num_tokens + num_new_tokens > limits.max_tokens:
            raise self.refusal(
                f"the waiting requests have {found.num_tokens} tokens; with {num_new_tokens} more "
                f"they would be over the limit of {limits.max_tokens} (--max-queued-tokens)",
                found,
            )
        wait_s = self.wait_s(found.num_ahead, found.num_running)
        if limits.max_delay_s and wait_s is not None and wait_s > limits.max_delay_s:
            raise self.refusal(
                f"a new request would wait for about {wait_s:.3g} s, and the limit is "
                f"{limits.max_delay_s:g} s (--max-queue-delay-s)",
                found,
                over_s=wait_s - limits.max_delay_s,
            )

    def refusal(self, what: str, found: Found, *, over_s: float = 0.0) -> Overloaded:
        """The error with a time after which half of the queue is served: earlier, most callers
        would be refused again. From 0.1 to 30 s; 1 s while nobody knows how fast it goes."""
        wait_s = self.wait_s(found.num_waiting, found.num_running)
        retry_s = _UNKNOWN_RETRY_S if wait_s is None else max(over_s, wait_s / 2)
        retry_s = min(max(retry_s, _LEAST_RETRY_S), _MOST_RETRY_S)
        return Overloaded(
            f"{what}; retry later, or on another engine.", retry_after_ms=round(retry_s * 1000)
        )
