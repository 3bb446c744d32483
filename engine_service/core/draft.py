"""A step while it is being put together: what each row will do and what budget is left.

It does not decide anything; the planner adds and drops rows.
"""

from __future__ import annotations

from engine_service.core.params import SchedulerLimits
from engine_service.core.request import Request
from engine_service.core.step import FULL, RowMask, Span, SteadyRows
from engine_service.core.strategy import Budget


class StepDraft:
    """Columns, in order: `spans[i]` is what `requests[i]` does. And the remaining budget.

    What is added counts as in flight; only a request that is preempted may be dropped again.

    Most rows change nothing but their span, so what is rare has tables of its own: a tuple with
    everything for every row cost 0.1 ms a step at 256 rows.
    """

    __slots__ = (
        "budget", "constrained", "first_pages", "has_dropped", "newcomers", "requests", "spans",
        "steady",
    )  # fmt: skip

    def __init__(self, limits: SchedulerLimits, num_rows: int) -> None:
        """Of `num_rows` at most, without those of the convoy."""
        self.budget = Budget(
            limits.token_budget, limits.logit_budget, limits.canvas_budget, num_rows
        )
        self.requests: list[Request] = []
        self.spans: list[Span] = []
        self.first_pages: dict[int, int] = {}
        """By request key: the first page-table entry that the worker does not know yet."""
        self.newcomers: list[Request] = []
        """They take their rows in this step."""
        self.constrained: list[Request] = []
        """They decide by masks of their own."""
        self.steady: SteadyRows | None = None
        """The convoy's rows, whose share is out of the budget already."""
        self.has_dropped = False
        """A request lost its row to another one."""

    def add(self, request: Request, span: Span) -> bool:
        """Takes the span's share out of the budget; False, and nothing is done, when it lacks."""
        _, start, stop, _, block, first, last, _, _, _, _, aside, _ = span
        budget = self.budget
        size = stop - start if aside < 2 else span.num_tokens
        tokens = budget.tokens - size
        logits = budget.logits - last + first
        if tokens < 0 or logits < 0 or budget.rows < 1:
            return False
        if block == FULL and start == 0:
            budget.canvases -= size
        budget.tokens = tokens
        budget.logits = logits
        budget.rows -= 1
        self.requests.append(request)
        self.spans.append(span)
        request.in_flight += 1
        request.launched = span
        request.decoding = last > first
        if request.constraint is not None and last > first:
            self.constrained.append(request)
        return True

    def reserve(self, num_rows: int, *, beside: int = 0) -> bool:
        """Takes the share of steady rows out of the budget; False, and nothing is done, when it
        lacks, or would lack if all of `beside` rows were as small."""
        budget = self.budget
        if max(num_rows, beside) > min(budget.tokens, budget.logits):
            return False
        budget.tokens -= num_rows
        budget.logits -= num_rows
        return True

    @property
    def masks(self) -> tuple[RowMask, ...]:
        """What the rows may choose that decide by masks of their own; waits until that is known."""
        rows = [(request.row, request.constraint) for request in self.constrained]
        return tuple([RowMask(row, one.mask) for row, one in rows if one is not None])

    def has(self, request: Request) -> bool:
        """Whether the request does something in this step. O(rows)."""
        return request in self.requests

    def drop(self, request: Request) -> None:
        """Takes a request out again, if it is in, and gives its share back."""
        self.has_dropped = True
        self.first_pages.pop(request.key, None)
        if not self.has(request):
            return
        index = self.requests.index(request)
        del self.requests[index]
        if request in self.constrained:
            self.constrained.remove(request)
        span = self.spans.pop(index)
        request.in_flight -= 1
        self.budget.tokens += span.num_tokens
        self.budget.canvases += span.num_tokens if span.is_whole else 0
        self.budget.logits += span.num_decided
        self.budget.rows += 1
