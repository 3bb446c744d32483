"""A step while it is being put together: what each row will do and what budget is left.

It does not decide anything; the scheduler adds and drops entries.
"""

from __future__ import annotations

from typing import NamedTuple

from engine_service.core.request import Request
from engine_service.core.step import Span
from engine_service.core.strategy import Budget, View


class Entry(NamedTuple):
    """One request's part of a step. `view` is what the span was planned from."""

    request: Request
    view: View
    span: Span
    first_page: int
    """Index of the first page-table entry that the worker does not know yet."""
    is_new: bool
    """The request takes its row in this step."""


class StepDraft:
    """Entries by key, in order, and the remaining budget."""

    __slots__ = ("budget", "entries")

    def __init__(self, tokens: int, logits: int) -> None:
        self.budget = Budget(tokens, logits)
        self.entries: dict[int, Entry] = {}

    def add(self, request: Request, view: View, span: Span, first_page: int, is_new: bool) -> None:
        """Takes the span's share out of the budget."""
        self.entries[request.key] = Entry(request, view, span, first_page, is_new)
        _, start, stop, _, _, first, last, score_start, score_stop = span
        budget = self.budget
        budget.tokens -= stop - start
        budget.logits -= last - first + score_stop - score_start

    def drop(self, key: int) -> None:
        """Takes a request out again, if it is in, and gives its share back."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.budget.tokens += entry.span.num_tokens
            self.budget.logits += entry.span.num_logits
