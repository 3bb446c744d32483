"""How rows are spread over the steps in flight where a model runs in stages.

A row whose token is on its way sits out until that is known, so that a step is of other rows than
those ahead of it; each takes about an equal part of them, so that all stages have as much to do. It
does not know pages or budgets.
"""

from __future__ import annotations

from collections.abc import Sized

from engine_service.core.request import Request
from engine_service.core.strategy import NO_BOUND


class Cohorts:
    """`count` steps of different rows are in flight; 1: tokens are handed from one step to the next
    on the device, and all rows go together."""

    def __init__(self, count: int, max_rows: int) -> None:
        self._count, self._max_rows = count, max_rows

    def sits_out(self, request: Request) -> bool:
        """Whether the row waits for what a step in flight decides in it. Where that decides
        nothing, more of the prompt may follow at once."""
        return self._count > 1 and request.in_flight > 0 and request.decoding

    def share(self, running: Sized, waiting: Sized) -> int:
        """Most rows of a step while these requests run and wait."""
        if self._count == 1:
            return NO_BOUND
        num_rows = min(len(running) + len(waiting), self._max_rows)
        return max(1, -(-num_rows // self._count))
