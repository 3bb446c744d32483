"""Decides what every step computes, and turns the decisions into tokens and finishes.

It owns every request. It does not know a method's name, a tensor or a connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from engine_service.core.constraint import MaskMaker
from engine_service.core.control import PAUSED, PauseMode
from engine_service.core.deadlines import Deadlines
from engine_service.core.draft import StepDraft
from engine_service.core.finish import find_stop
from engine_service.core.gate import Gate
from engine_service.core.journal import KvEvent
from engine_service.core.messages import Abort, FinishReason, Load, Reject, StepOutput, Submit
from engine_service.core.opening import open_request
from engine_service.core.output import OutputWriter
from engine_service.core.pages import PageManager
from engine_service.core.params import SchedulerLimits
from engine_service.core.pinning import keep_pinned
from engine_service.core.planner import Planner
from engine_service.core.pool_admission import Admits
from engine_service.core.request import Ending, Request
from engine_service.core.step import (
    EMPTY_CANVAS,
    Decision,
    Decisions,
    PageAppend,
    Span,
    StepPlan,
)


class Scheduler:
    """submit, abort, schedule, apply, emit. Single-threaded; times come from `clock` (ns)."""

    def __init__(
        self,
        *,
        admission: Admits,
        pages: PageManager,
        limits: SchedulerLimits,
        masks: MaskMaker | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._admission = admission
        self._pages = pages
        self.planner = Planner(pages, limits)
        self.gate = Gate(limits, self.planner.waiting)
        self._clock = clock
        self._masks = masks or MaskMaker()
        self._requests: dict[int, Request] = {}
        self._deadlines = Deadlines(self._requests)
        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self._seq = 0
        self._output = OutputWriter()

    @property
    def has_work(self) -> bool:
        """Whether a turn of the loop would do anything."""
        return bool(self._output) or (bool(self._requests) and not self.is_still)

    @property
    def is_still(self) -> bool:
        """Whether it is paused, and nothing runs any more that the pause lets finish."""
        mode = self.planner.paused
        if mode is None or self._in_flight:
            return False
        return mode is PauseMode.KEEP or not self.planner.num_started

    @property
    def load(self) -> Load:
        """How full queue, rows and pool are."""
        return self.planner.load

    @property
    def live_tokens(self) -> int:
        """Positions whose KV is in the pages, or is being computed. O(requests)."""
        return self.planner.live_tokens

    def pause(self, mode: PauseMode) -> None:
        """No request is started from here on; what becomes of the others says the mode."""
        self.planner.paused = mode
        self.gate.stand(self._clock(), still=mode is PauseMode.KEEP)
        if mode is PauseMode.ABORT:
            self.abort_all(PAUSED)

    def resume(self) -> None:
        """Ends a pause; nothing where there is none."""
        self.planner.paused = None
        self.gate.stand(self._clock(), still=False)

    def flush_cache(self) -> int:
        """Forgets all prefixes; returns how many pages were kept for them."""
        return self._pages.flush()

    def snapshot_pages(self) -> list[KvEvent]:
        """The prefix index as events; from now on `take_kv_events` has what changes."""
        return self._pages.journal.snapshot()

    def take_kv_events(self) -> list[KvEvent]:
        """What changed in the prefix index since the last call."""
        return self._pages.journal.take()

    def prepare(self, submit: Submit, num_preparing: int) -> Future[None] | None:
        """Starts what a sequence needs before it is submitted; None: nothing. Raises Overloaded."""
        if submit.constraint is not None:
            self.gate.check_preparing(num_preparing)
        return self._masks.compile(submit.constraint)

    def submit(self, submit: Submit, *, is_aborted: bool = False) -> list[Reject]:
        """Queues a sequence; raises the ServiceError that the caller is to get instead. Answers who
        was given up for it: nearly always nobody, and never for one that is aborted at once."""
        assert submit.key not in self._requests, f"key {submit.key} is live already"
        given_up = None
        if not is_aborted:
            given_up = self.gate.room_for(submit, self.planner.num_servable, self.load.running)
        admitted = self._admission.admit(submit)
        request = open_request(submit, admitted, self._pages, self._clock())
        if request.constraint is not None:
            self._masks.begin(request.constraint)
        self._requests[request.key] = request
        self.planner.enqueue(request)
        if submit.deadline_ns is not None:
            self._deadlines.watch(submit.deadline_ns, request.key)
        if given_up is None:
            return []
        self._release(given_up)
        return [self.gate.refusal(given_up, self.planner.num_servable)]

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
        for key in self._deadlines.due(now):
            late = Ending(FinishReason.DEADLINE, "the deadline has passed")
            self._end(self._requests[key], late, now)
        self._masks.wait(beside_step=bool(self._in_flight))
        draft = self.planner.plan(now, beside_step=bool(self._in_flight))
        if draft.requests or draft.steady:
            return self._launch_plan(draft)
        runs = self._in_flight or self.planner.paused is not None
        assert runs or not self._requests, f"stuck with {len(self._requests)} requests"
        return None

    def apply(self, plan: StepPlan, decisions: Decisions) -> None:
        """Takes the decisions of the oldest step in flight."""
        launched, requests = self._in_flight.popleft()
        assert launched is plan, f"step {plan.seq} collected before step {launched.seq}"
        now = self._clock()
        for request, span, decision in zip(requests, plan.own_spans, decisions.own, strict=True):
            self._take(request, span, decision, now)
        if plan.steady:
            self._land(decisions.steady, now)
        self._masks.begin()

    def emit(self, *, heartbeat: bool = False) -> StepOutput | None:
        """What there is to tell since the last call; None when nothing, unless `heartbeat`."""
        return self._output.take(self.load) if self._output or heartbeat else None

    def check_integrity(self) -> None:
        """Asserts the invariants of pages, rows and queues. For tests and debugging."""
        self.planner.check_integrity(self._requests)

    def _launch_plan(self, draft: StepDraft) -> StepPlan:
        appends: list[PageAppend] = []
        for key, first_page in draft.first_pages.items():
            request = self._requests[key]
            added = tuple(request.table.pages[first_page:])
            appends.append(PageAppend(request.row, first_page, added))
        self._seq += 1
        plan = StepPlan(
            seq=self._seq,
            new_rows=tuple([request.new_row() for request in draft.newcomers]),
            page_appends=tuple(appends),
            own_spans=tuple(draft.spans),
            steady=draft.steady,
            masks=draft.masks,
            settled=self._seq - len(self._in_flight) - 1,
        )
        self._in_flight.append((plan, draft.requests))
        return plan

    def _land(self, token_ids: list[int], now: int) -> None:
        """Takes the tokens of the rows that only move on."""
        convoy = self.planner.convoy
        keys, token_ids, stragglers, full = convoy.land(token_ids)
        self._output.rows(keys, token_ids)
        for request, num_cached in full:
            self._pages.seal(request.table, request.committed, num_cached)
            convoy.note_unit(request)
        for request, span, token_id in stragglers:
            self._take(request, span, Decision([token_id], [True]), now)

    def _take(self, request: Request, span: Span, decision: Decision | None, now: int) -> None:
        request.in_flight -= 1
        if request.ending is None:
            if decision is None or not self._append(request, span, decision.token_ids):
                self._settle(request, span, decision, now)
        elif request.in_flight == 0:
            self._release(request)

    def _append(self, request: Request, span: Span, run: list[int]) -> bool:
        """Commits a run where nothing else can be due; else does nothing and returns False.

        Rows on their way into the convoy take this way, and those it let go with nothing due yet.
        """
        committed = request.committed
        is_smooth = len(committed) + len(run) < request.smooth_until
        if not is_smooth or not request.stop_ids.isdisjoint(run):
            return False
        committed += run
        request.num_cached = span.stop
        request.forward_passes += 1
        self._output.row(request.key, run)
        return True

    def _settle(self, request: Request, span: Span, decision: Decision | None, now: int) -> None:
        """Applies one decision: commit, cut at the first end, seal, report."""
        self.planner.convoy.leave(request)
        committed, before = request.committed, request.canvas
        first_open = max(span.decide_start, len(committed))
        denoises = bool(before.token_ids) and span.decide_stop > first_open
        update = request.strategy.settle(len(committed), before, span, decision)
        if request.pinned:
            update = keep_pinned(update, len(committed), request.pinned, request.max_len)
        run, logprobs, request.num_cached, canvas = update
        canvas = canvas.watched() if request.emit_canvas else canvas
        stop = find_stop(committed, request.prompt_len, run, request.sampling) if run else None
        if request.constraint is not None and run:
            stop = request.constraint.read(run, stop)
            if stop is None:
                self._masks.add(request.constraint)
        if stop:
            run, canvas = run[: stop.keep], EMPTY_CANVAS
        news = run[max(0, request.told_len - len(committed)) :]
        committed += run
        request.canvas = canvas
        request.forward_passes += 1
        request.denoise_steps += denoises
        if denoises:
            self.planner.counting.denoised(span.decide_stop - first_open, len(run))
        if request.marks is not None:
            request.mark(now, span, len(run), before if denoises else None)
        if request.first_token_ns is None and run:
            request.first_token_ns = now
        if len(committed) >= request.table.seal_at:
            self._pages.seal(request.table, committed, request.num_cached)
        request.look_ahead()
        if news:
            scored = None if logprobs is None else logprobs[len(run) - len(news) : len(run)]
            is_first = len(committed) - len(news) == request.prompt_len
            self._output.tell(request.key, news, scored, request.cached_tokens if is_first else -1)
        if span.score_stop > span.score_start:
            self._report_scores(request, span, decision)
        is_shown = request.emit_canvas and len(committed) >= request.told_len
        if is_shown and canvas.token_ids and (run or canvas != before):
            self._output.canvas(request.key, request.shown())
        if (ending := request.ends_by(stop, decision)) is not None:
            self._end(request, ending, now)

    def _report_scores(self, request: Request, span: Span, decision: Decision | None) -> None:
        assert decision is not None, "a prompt was scored without a decision"
        assert decision.scores is not None, "a prompt was scored without scores"
        row = self._output.row_of(request.key)
        self._output.prompt_logprobs(row, span.score_start, decision.scores)
        request.score_from = span.score_stop

    def _end(self, request: Request, ending: Ending, now: int) -> None:
        """Tells the caller; the first ending wins."""
        if request.ending is not None:
            return
        self.planner.convoy.leave(request)
        request.ending = ending
        self._output.finish(request.key, request.finish(ending, now))
        if request.in_flight == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        if request.row >= 0 and request.started_ns is not None and request.ending is not None:
            self.gate.note(request.started_ns, self._clock(), request.ending.reason)
        self.planner.leave(request)
        del self._requests[request.key]
