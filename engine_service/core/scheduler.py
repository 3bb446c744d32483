"""Decides what every step computes, and turns the decisions into tokens and finishes.

It owns every request. It does not know a method's name, a tensor or a connection.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine_service.core.admission import Admission
from engine_service.core.draft import Entry
from engine_service.core.finish import find_stop
from engine_service.core.messages import Abort, FinishReason, StepOutput, Submit
from engine_service.core.output import OutputWriter
from engine_service.core.pages import PageManager
from engine_service.core.params import SchedulerLimits
from engine_service.core.planner import Planner
from engine_service.core.request import Ending, Request
from engine_service.core.step import EMPTY_CANVAS, Decision, NewRow, PageAppend, StepPlan, Update
from tidemill.runtime.errors import Overloaded

RETRY_AFTER_MS = 1000
"""What a full queue tells callers to wait: about the life of a short request."""


class Scheduler:
    """submit, abort, schedule, apply, emit. Single-threaded; times come from `clock` (ns)."""

    def __init__(
        self,
        *,
        admission: Admission,
        pages: PageManager,
        limits: SchedulerLimits,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._admission = admission
        self._pages = pages
        self._planner = Planner(pages, limits)
        self._max_queued = limits.max_queued_requests
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._epochs = [0] * limits.max_rows
        self._in_flight: deque[tuple[StepPlan, list[Entry]]] = deque()
        self._seq = 0
        self._output = OutputWriter()

    @property
    def has_work(self) -> bool:
        """Whether a turn of the loop would do anything."""
        return bool(self._requests) or bool(self._output)

    def submit(self, submit: Submit) -> None:
        """Queues a sequence; raises the ServiceError that the caller is to get instead."""
        assert submit.key not in self._requests, f"key {submit.key} is live already"
        if self._planner.num_waiting >= self._max_queued:
            raise Overloaded(
                f"{self._max_queued} requests are waiting, which is the limit "
                "(--max-queued-requests); retry later.",
                retry_after_ms=RETRY_AFTER_MS,
            )
        token_ids, strategy, params, sampling = self._admission.admit(submit)
        prompt_len = len(token_ids)
        request = Request(
            key=submit.key,
            request_id=submit.request_id,
            committed=token_ids,
            prompt_len=prompt_len,
            canvas=strategy.begin(prompt_len, params),
            strategy=strategy,
            params=params,
            sampling=sampling,
            table=self._pages.open(strategy.mask_block, submit.cache_salt),
            priority=submit.priority,
            arrival_ns=submit.arrival_ns or self._clock(),
            emit_canvas=submit.emit_canvas,
            score_from=prompt_len if sampling.prompt_logprobs is None else 1,
        )
        self._requests[request.key] = request
        self._planner.enqueue(request)
        if submit.deadline_ns is not None:
            heapq.heappush(self._deadlines, (submit.deadline_ns, request.key))

    def abort(self, abort: Abort) -> None:
        """Ends a sequence; its row and pages go back when the steps that name it are collected."""
        request = self._requests.get(abort.key)
        if request is not None:
            ending = Ending(abort.reason, abort.detail, None, abort.completion_tokens)
            self._end(request, ending, self._clock())

    def abort_all(self, detail: str) -> None:
        """Ends everything that is left, with one answer each."""
        for key in list(self._requests):
            self.abort(Abort(key, detail=detail))

    def schedule(self) -> StepPlan | None:
        """The next step; None when there is nothing to run beside the step in flight."""
        now = self._clock()
        self._expire(now)
        entries = self._planner.plan(now, beside_step=bool(self._in_flight))
        if entries:
            return self._launch_plan(entries)
        assert self._in_flight or not self._requests, f"stuck with {len(self._requests)} requests"
        return None

    def apply(self, plan: StepPlan, decisions: Sequence[Decision | None]) -> None:
        """Takes the decisions of the oldest step in flight, one for every span of its plan."""
        launched, entries = self._in_flight.popleft()
        assert launched is plan, f"step {plan.seq} collected before step {launched.seq}"
        now = self._clock()
        for entry, decision in zip(entries, decisions, strict=True):
            request = entry.request
            request.in_flight -= 1
            if request.ending is None:
                self._settle(entry, decision, now)
            elif request.in_flight == 0:
                self._release(request)

    def emit(self, *, heartbeat: bool = False) -> StepOutput | None:
        """What there is to tell since the last call; None when nothing, unless `heartbeat`."""
        if not self._output and not heartbeat:
            return None
        return self._output.take(self._planner.load)

    def check_integrity(self) -> None:
        """Asserts the invariants of pages, rows and queues. For tests and debugging."""
        self._planner.check_integrity(self._requests)

    def _expire(self, now: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            request = self._requests.get(key)
            if request is not None:
                self._end(request, Ending(FinishReason.DEADLINE, "the deadline has passed"), now)

    def _launch_plan(self, entries: list[Entry]) -> StepPlan:
        new_rows: list[NewRow] = []
        appends: list[PageAppend] = []
        for request, view, span, first_page, is_new in entries:
            request.in_flight += 1
            request.launched = view, span
            request.decoding = span.decide_stop > span.decide_start
            if is_new:
                new_rows.append(self._new_row(request))
            if len(request.table.pages) > first_page:
                added = tuple(request.table.pages[first_page:])
                appends.append(PageAppend(span.row, first_page, added))
        self._seq += 1
        plan = StepPlan(
            seq=self._seq,
            new_rows=tuple(new_rows),
            page_appends=tuple(appends),
            spans=tuple([entry.span for entry in entries]),
        )
        self._in_flight.append((plan, entries))
        return plan

    def _new_row(self, request: Request) -> NewRow:
        self._epochs[request.row] += 1
        return NewRow(
            row=request.row,
            epoch=self._epochs[request.row],
            token_ids=list(request.committed),
            prompt_len=request.prompt_len,
            canvas=request.canvas,
            method=request.strategy.name,
            params=request.params,
            sampling=request.sampling,
        )

    def _settle(self, entry: Entry, decision: Decision | None, now: int) -> None:
        """Applies one decision: commit, cut at the first end, seal, report."""
        request, view, span, _, _ = entry
        update = request.strategy.settle(view, span, decision)
        run, _, num_cached, canvas = update
        stop = run and find_stop(request.committed, request.prompt_len, run, request.sampling)
        if stop:
            run, canvas = run[: stop.keep], EMPTY_CANVAS
        request.committed += run
        request.canvas = canvas
        request.num_cached = num_cached
        request.forward_passes += 1
        if view.canvas.token_ids and span.decide_stop > span.decide_start:
            request.denoise_steps += 1
        if request.first_token_ns is None and run:
            request.first_token_ns = now
        self._pages.seal(request.table, request.committed, num_cached)
        self._report(entry, decision, update, run)
        if stop:
            self._end(request, Ending(stop.reason, stop.detail, stop.stop_token_id), now)

    def _report(
        self, entry: Entry, decision: Decision | None, update: Update, run: list[int]
    ) -> None:
        request, view, span, _, _ = entry
        scored = span.score_stop > span.score_start
        canvas = request.canvas
        shows_canvas = request.emit_canvas and bool(canvas.token_ids) and canvas != view.canvas
        if not (run or scored or shows_canvas):
            return
        row = self._output.row(request.key, run)
        if run and update.logprobs is not None:
            self._output.logprobs(row, update.logprobs[: len(run)])
        if scored:
            assert decision is not None, "a prompt was scored without a decision"
            assert decision.scores is not None, "a prompt was scored without scores"
            self._output.prompt_logprobs(row, span.score_start, decision.scores)
            request.score_from = span.score_stop
        if shows_canvas:
            self._output.canvas(row, len(request.committed), canvas)

    def _end(self, request: Request, ending: Ending, now: int) -> None:
        """Tells the caller; the first ending wins."""
        if request.ending is not None:
            return
        request.ending = ending
        self._output.finish(request.key, request.finish(ending, now))
        if request.in_flight == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._planner.leave(request)
        del self._requests[request.key]
