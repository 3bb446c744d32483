"""What people see while several ranks load: the tensors of all of them, until the slowest is done.

It does not know files.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine_service.ranks.messages import WEIGHTS, Stage
from engine_service.ranks.watcher import Watcher

Report = Callable[[str, int, int], None]
"""Called as (stage, done, total) during start-up; total 0: no number known."""

_PAUSE_S = 0.1


class Loading:
    """Rank 0's side: `tell` is its worker's `report`."""

    def __init__(self, report: Report, watcher: Watcher) -> None:
        self._report = report
        self._watcher = watcher
        self._stage = ""
        self._own = (0, 0)

    def tell(self, stage: str, done: int, total: int) -> None:
        """Behind its own weights rank 0 waits for those of the others: the next stage needs them
        all. Raises the group's loss."""
        if self._stage == WEIGHTS != stage:
            self._watcher.await_all(lambda one: one.has_weights, meanwhile=self._add_up)
        self._stage = stage
        if stage == WEIGHTS and total:
            self._own = done, total
            self._add_up()
        else:
            self._report(stage, done, total)

    def _add_up(self) -> None:
        """A rank that has not told how many it reads is taken to read as many as this one."""
        done, total = self._own
        for one in self._watcher.followers:
            done += one.tensors[0]
            total += one.tensors[1] or self._own[1]
        self._report(WEIGHTS, done, total)


class Told:
    """A follower's side: `report` of its worker, sent on when something new is to be seen."""

    def __init__(self, send: Callable[[Stage], None]) -> None:
        self._send = send
        self._stage = ""
        self._at = 0.0

    def report(self, stage: str, done: int, total: int) -> None:
        """Ten times a second is enough, and the last of a stage."""
        now = time.monotonic()
        if stage != self._stage or done == total or now - self._at > _PAUSE_S:
            self._stage, self._at = stage, now
            self._send(Stage(stage, done, total))
