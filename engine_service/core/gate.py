"""Who may queue: the bounds of the queue, and whom a full one gives up for somebody else.

It does not know what a request asks for, only whose it is and how long.
"""

from __future__ import annotations

from bisect import bisect_right

from engine_service.core.messages import FinishReason, Reject, Submit
from engine_service.core.params import SchedulerLimits
from engine_service.core.policy.bounds import Found, QueueBounds, QueueLimits
from engine_service.core.policy.fair import FairQueue
from engine_service.core.request import Request
from tidemill.runtime.errors import Overloaded

_TOKEN_BYTES = 4
_GIVEN_UP = (FinishReason.ABORTED, FinishReason.DEADLINE)
"""Ends that the caller chose, not the request."""
_MOST_KEPT = 256
"""Pauses that are told apart."""


class _Kept:
    """How long an engine stood still with rows in use, by when each time ended."""

    def __init__(self) -> None:
        self._began: int | None = None
        self._ended: list[int] = []
        self._until: list[int] = [0]
        """All time up to each end, and at first none."""

    def stand(self, now_ns: int, *, still: bool) -> None:
        """From here on it does, or does not."""
        if still == (self._began is not None):
            return
        if self._began is not None:
            self._ended.append(now_ns)
            self._until.append(self._until[-1] + now_ns - self._began)
            # Those before are as if they had been one.
            del self._ended[:-_MOST_KEPT], self._until[: -_MOST_KEPT - 1]
        self._began = now_ns if still else None

    def since(self, then_ns: int, now_ns: int) -> int:
        """Of the time from `then`, at which it did not stand still."""
        running = 0 if self._began is None else now_ns - self._began
        return self._until[-1] - self._until[bisect_right(self._ended, then_ns)] + running


class Gate:
    """room_for, check_preparing, note, stand, forget. Single tenants find a plain bounded queue
    behind it."""

    def __init__(self, limits: SchedulerLimits, waiting: FairQueue) -> None:
        self._waiting = waiting
        self._limits = QueueLimits(
            limits.max_queued_requests, limits.max_queued_tokens, limits.max_queue_delay_s
        )
        self.forget()

    def forget(self) -> None:
        """Nobody knows how long requests stay, as at first."""
        self._bounds = QueueBounds(self._limits)
        self._kept = _Kept()

    def stand(self, now_ns: int, *, still: bool) -> None:
        """Rows are only kept from here on, which says nothing of how long requests stay; or no
        more."""
        self._kept.stand(now_ns, still=still)

    def room_for(self, submit: Submit, num_rows: int, num_running: int) -> Request | None:
        """Raises Overloaded where there is no room. Answers whose place the sequence may have:
        nearly always nobody's. Of the `num_rows` that requests can hold `num_running`
        are taken: the others are had without anybody ending.

        A key that fills the queue gives up its youngest for another key's, or for what is more
        urgent; else one tenant could lock the others out.
        """
        waiting = self._waiting
        ahead = waiting.num_ahead(submit.priority, submit.fairness_key)
        ahead -= max(0, num_rows - num_running)
        found = Found(len(waiting), waiting.num_tokens, max(0, ahead), num_rows)
        num_tokens = len(submit.prompt) // _TOKEN_BYTES
        try:
            self._bounds.check(found, num_tokens)
        except Overloaded:
            given_up = waiting.expendable(submit.priority, submit.fairness_key)
            if given_up is None:
                raise
            num_left = found.num_tokens - len(given_up.committed)
            without = found._replace(num_waiting=found.num_waiting - 1, num_tokens=num_left)
            self._bounds.check(without, num_tokens)
            return given_up
        return None

    def check_preparing(self, num_preparing: int) -> None:
        """Raises Overloaded where as many grammars are being compiled as requests may wait."""
        self._bounds.check(Found(num_preparing, 0, 0, 0), 0)

    def refusal(self, given_up: Request, num_running: int) -> Reject:
        """What the one who was given up is told."""
        waiting = self._waiting
        found = Found(len(waiting), waiting.num_tokens, 0, num_running)
        what = f"the queue is full, and {given_up.fairness_key!r} has most requests in it"
        return Reject(given_up.key, self._bounds.refusal(what, found))

    def note(self, started_ns: int, now_ns: int, reason: FinishReason) -> None:
        """A request gave its row back for good, which it got at `started`."""
        stay_ns = now_ns - started_ns - self._kept.since(started_ns, now_ns)
        self._bounds.note(stay_ns, now_ns, is_given_up=reason in _GIVEN_UP)
