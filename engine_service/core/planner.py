"""Decides which requests run in a step, and gives them rows and pages.

It owns the queue, the rows and the page tables' growth. It does not know what a step decided, nor
why a request ends.
"""

from __future__ import annotations

from itertools import chain, islice

from engine_service.core.cohorts import Cohorts
from engine_service.core.control import PauseMode
from engine_service.core.convoy import Convoy
from engine_service.core.draft import StepDraft
from engine_service.core.messages import Load
from engine_service.core.pages import PageManager
from engine_service.core.params import SchedulerLimits
from engine_service.core.policy.fair import FairQueue
from engine_service.core.request import Request
from engine_service.core.step import Span
from engine_service.core.tally import Counting


class Planner:
    """enqueue, plan, leave. Running requests first, then waiting ones in the policy's order.

    Nobody starves: a request that fits alone comes first in the order at some time, and the first
    one is never preempted for another.
    """

    def __init__(self, pages: PageManager, limits: SchedulerLimits) -> None:
        self._pages = pages
        self._limits = limits
        self._age_bound_ns = int(limits.age_bound_s * 1e9)
        self._running: dict[int, Request] = {}
        """Requests with a row."""
        self._cohorts = Cohorts(limits.num_cohorts, limits.max_rows)
        self.convoy = Convoy(is_open=limits.num_cohorts == 1)
        self.counting = Counting()
        self.waiting = FairQueue()
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self._catch_up_first = False
        self._is_short = False
        """Decoding rows found no budget in the last plan: they lead in the next one."""
        self._now = 0
        """Of the plan that is being made."""
        self._waits_for_pages = False
        """A row found no page: nothing is launched until preemption is possible again."""
        self.paused: PauseMode | None = None
        self.num_servable = limits.max_rows
        """Rows that requests can hold at once: all, or as many as there were last pages for."""
        self._foresees = False
        """Enough rows decide for the plan that is being made to assume what they decide."""

    @property
    def num_started(self) -> int:
        """Requests that had a row: all that run, and those that were preempted. O(waiting)."""
        return len(self._running) + sum(one.started_ns is not None for one in self.waiting)

    @property
    def load(self) -> Load:
        """How full queue, rows and pool are."""
        return Load(
            running=len(self._running),
            waiting=len(self.waiting),
            waiting_tokens=self.waiting.num_tokens,
            pages_used=self._pages.num_used,
            pages_total=self._pages.num_pages,
        )

    @property
    def live_tokens(self) -> int:
        """Positions of all rows whose KV is in the pages, or is being computed. O(rows)."""
        slow = [r.launched for key, r in self._running.items() if key not in self.convoy.members]
        return self.convoy.kv_tokens + sum(span.kv_len for span in slow if span is not None)

    def traced_keys(self, limit: int) -> list[int]:
        """Traced sequences that hold a row, at most `limit` of them. O(rows)."""
        traced = (key for key, request in self._running.items() if request.marks is not None)
        return list(islice(traced, limit))

    def enqueue(self, request: Request) -> None:
        """Lets a request wait for its turn."""
        self.waiting.add(request)

    def leave(self, request: Request) -> None:
        """Takes an ending request out and releases its row and pages.

        No step in flight may name it.
        """
        assert request.in_flight == 0, f"{request.request_id} is named by a step in flight"
        if request.row >= 0:
            self._leave_row(request)
        else:
            self.waiting.remove(request)

    def plan(self, now: int, *, beside_step: bool = False) -> StepDraft:
        """What every row does in the next step; without requests when nothing can run.

        `beside_step` says that a step is in flight: requests that it names do what their strategy
        knows ahead of the decision, and nobody is preempted.
        """
        self._now = now
        draft = StepDraft(self._limits, self._cohorts.share(self._running, self.waiting))
        if self.paused is PauseMode.KEEP or (beside_step and self._waits_for_pages):
            return draft
        self._waits_for_pages = False
        self.num_servable = self.num_servable if self.waiting else self._limits.max_rows
        aged_before = now - self._age_bound_ns
        if self._plan_running(draft, aged_before, beside_step) and self._free_rows:
            self._plan_waiting(draft, aged_before, now)
        draft.steady = self.convoy.launch()
        num_rows = len(draft.spans) + len(self.convoy)
        if draft.has_dropped and not num_rows:
            return self.plan(now)  # who took the budget lost its row: there is room for others
        if num_rows:
            self.counting.step(self._limits.token_budget - draft.budget.tokens, num_rows)
        return draft

    def check_integrity(self, requests: dict[int, Request]) -> None:
        """Asserts the invariants of pages, rows and queue, given all live requests."""
        self._pages.check_integrity(request.table for request in requests.values())
        rows = [*self._free_rows, *(request.row for request in self._running.values())]
        assert sorted(rows) == list(range(self._limits.max_rows)), f"rows leaked: {rows}"
        waiting = {request.key for request in self.waiting}
        assert not waiting & self._running.keys(), "a request waits and runs"
        assert waiting | self._running.keys() == requests.keys(), "a request is lost"
        for request in self.waiting:
            assert not request.table.pages, "a waiting request holds pages"
            assert request.row < 0, "a waiting request holds a row"
        for request in self._running.values():
            self._pages.check_writable(request.table, self.convoy.num_cached(request))
        assert self.convoy.members.keys() <= self._running.keys(), "a request moves on without row"

    def _plan_running(self, draft: StepDraft, aged_before: int, beside_step: bool) -> bool:
        """Plans the rows that are taken; True when there may be room for waiting requests.

        Short spans go first, so that a long prompt never stalls the others; if that leaves
        nothing for any prompt, prompts go first in the next step. Rows that found no budget
        lead next time.
        """
        self._plan_convoy(draft)
        members = self.convoy.members
        ready = [r for key, r in self._running.items() if key not in members and r.ending is None]
        catching_up = [request for request in ready if not request.decoding]
        decoding = [request for request in ready if request.decoding] if catching_up else ready
        size = sum(r.launched.num_tokens for r in decoding if r.decoding and r.launched)
        self._foresees = size >= self._limits.foreseen_tokens
        groups = (catching_up, decoding) if self._catch_up_first else (decoding, catching_up)
        left_out: dict[int, Request] = {}
        for request in chain(*groups):
            # A row below 0 was taken from it for the pages of one before it.
            if request.row >= 0 and not self._extend(request, draft, aged_before, beside_step):
                left_out[request.key] = request
        self._catch_up_first = bool(catching_up) and not any(map(draft.has, catching_up))
        leading = {key: r for key, r in left_out.items() if r.decoding and r.row >= 0}
        self._is_short = bool(leading) and not self._waits_for_pages
        if leading:
            self._running = leading | self._running
        return not left_out and not draft.has_dropped

    def _plan_convoy(self, draft: StepDraft) -> None:
        """Reserves share and pages of the rows that only move on. They go one by one, like the
        others, where somebody would have to go without."""
        convoy = self.convoy
        convoy.leave_ended()
        others_first = self._catch_up_first or self._is_short
        if others_first or not draft.reserve(len(convoy), beside=len(self._running)):
            for request in list(convoy.members.values()):
                convoy.leave(request)
        for request, num_tokens in convoy.lacking():
            first_page = len(request.table.pages)
            if self._pages.reserve(request.table, num_tokens):
                draft.first_pages[request.key] = first_page
                convoy.note_page(request)
            else:
                convoy.leave(request)

    def _extend(
        self, request: Request, draft: StepDraft, aged_before: int, beside_step: bool
    ) -> bool:
        """Plans one running request; False without budget, or without pages while nobody can be
        preempted.

        A decoding row mostly moves on within its last page: then neither a View is built nor the
        pool asked, and where its end is not near it joins the convoy.
        """
        if self._cohorts.sits_out(request):
            return True
        launched, constraint = request.launched, request.constraint
        if constraint is not None:
            if beside_step and not constraint.is_ready:
                return True
            launched = None
        span = request.strategy.advance(launched) if launched and request.decoding else None
        if span is not None and span.decide_stop <= request.smooth_until:
            if not draft.budget.allows(span) or not self.convoy.join(request, span):
                return draft.add(request, span)
            draft.reserve(1)
            return True
        if span is None:
            view = request.view_ahead(foresees=self._foresees)
            if view is None:
                return True
            span = request.strategy.plan(view, draft.budget)
        elif span.decide_start >= request.max_len:
            return True
        if span is None or not draft.budget.allows(span):
            return False
        if span.kv_len > request.table.capacity:
            return self._extend_with_pages(request, span, draft, aged_before, beside_step)
        return draft.add(request, span)

    def _extend_with_pages(
        self, request: Request, span: Span, draft: StepDraft, aged_before: int, beside_step: bool
    ) -> bool:
        """Reserves the pages that `span` needs, preempting others for them."""
        first_page = len(request.table.pages)
        while not self._pages.reserve(request.table, span.kv_len):
            if beside_step:
                self._waits_for_pages = True
                return False
            victim = max(self._running.values(), key=self.waiting.ranking(aged_before))
            draft.drop(victim)
            self._preempt(victim)
            if victim is request:
                return True
        draft.first_pages[request.key] = first_page
        request.look_ahead()
        added = draft.add(request, span)
        assert added, f"pages were reserved for a span beyond the budget: {span}"
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue; everything that was cached is computed again."""
        self._leave_row(request)
        request.restart(self._now)
        self.num_servable = len(self._running)
        self.counting.num_preemptions += 1
        self.waiting.add(request)

    def _plan_waiting(self, draft: StepDraft, aged_before: int, now: int) -> None:
        for request in self.waiting.in_order(aged_before):
            if not self._free_rows or min(draft.budget.tokens, draft.budget.rows) <= 0:
                return
            if self.paused is not None and request.started_ns is None:
                continue
            if request.waits_for is not None and self._pages.is_claimed(request.waits_for):
                continue
            if request.constraint is not None and not request.constraint.is_ready:
                continue
            if not self._admit(request, draft, now):
                return

    def _admit(self, request: Request, draft: StepDraft, now: int) -> bool:
        """Gives a waiting request a row if it fits; False when nobody behind it may try either.

        It must find pages for all it has to compute, so that it is not preempted at once.
        """
        pages, table, tokens = self._pages, request.table, request.committed
        limit = request.strategy.max_cached(len(tokens))
        match = pages.match(table, tokens, limit if request.sampling.prompt_logprobs is None else 0)
        request.waits_for = match.waits_for
        if match.waits_for is not None:
            return True
        request.num_cached = pages.adopt(table, match)
        missing = pages.pages_for(request.strategy.room(request.view())) - len(match.pages)
        request.row = self._free_rows[-1]
        fits = missing <= pages.num_free
        self.num_servable = self._limits.max_rows if fits else len(self._running)
        span = request.strategy.plan(request.view(), draft.budget) if fits else None
        if span is None:
            pages.release(table)
            request.num_cached, request.row = 0, -1
            return False
        reserved = pages.reserve(table, span.kv_len)
        assert reserved, f"{missing} pages were free for request {request.request_id}"
        pages.claim(table, tokens, limit)
        is_new = request.started_ns is None
        self.waiting.start(request, len(tokens) - request.num_cached if is_new else 0)
        self._running[request.key] = request
        self._free_rows.pop()
        request.resume(now)
        if is_new:
            request.started_ns, request.cached_tokens = now, request.num_cached
            self.counting.looked_up(len(tokens), request.num_cached)
        draft.add(request, span)
        draft.newcomers.append(request)
        draft.first_pages[request.key] = 0
        return True

    def _leave_row(self, request: Request) -> None:
        self.convoy.leave(request)
        self._pages.release(request.table)
        self.waiting.stop(request)
        del self._running[request.key]
        self._free_rows.append(request.row)
        request.row = -1
        request.launched = None
        request.smooth_until = 0
