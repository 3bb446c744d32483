"""The scheduler under random use, checked after every operation, and what each broken rule does.

Steps overlap in half of the runs, as on a device; the other half collects each step at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from engine_service.core.draft import StepDraft
from engine_service.core.messages import Abort, Finish, FinishReason
from engine_service.core.output import OutputWriter
from engine_service.core.params import SchedulerLimits
from engine_service.core.planner import Planner
from engine_service.core.request import Ending, Request
from engine_service.core.scheduler import Scheduler
from engine_service.core.step import StepPlan
from tests.unit.test_scheduler import BLOCK, Desk

METHODS = (None, "block_diffusion")


class Crowd:
    """Random requests that come, end, expire and are aborted at any moment."""

    def __init__(self, rng: random.Random, *, overlaps: bool) -> None:
        self.rng = rng
        self.token_budget = rng.randint(BLOCK, 40)
        self.logit_budget = rng.randint(BLOCK, 20)
        self.desk = Desk(
            num_pages=rng.randint(24, 48),
            max_rows=rng.randint(1, 5),
            token_budget=self.token_budget,
            logit_budget=self.logit_budget,
            reveals=rng.randint(1, BLOCK),
        )
        self.depth = int(overlaps)
        self.flights: deque[tuple[StepPlan, dict[int, int]]] = deque()
        self.num_preempted = 0

    @property
    def keys(self) -> dict[int, int]:
        """Row to key of everything that holds a row."""
        running = self.desk.scheduler.planner._running.values()
        return {request.row: request.key for request in running}

    def operate(self) -> None:
        """One of: a request enters, one is aborted, or a step is launched or collected."""
        rng, action = self.rng, self.rng.random()
        self.desk.now += 1_000_000
        if action < 0.15 and len(self.desk.scheduler._requests) < 10:
            self.enter()
        elif action < 0.2 and self.desk.tokens:
            self.desk.scheduler.abort(Abort(rng.choice(list(self.desk.tokens))))
        elif len(self.flights) <= self.depth and self.launch():
            pass
        elif self.flights:
            self.collect()

    def enter(self) -> None:
        rng, key = self.rng, len(self.desk.tokens)
        lengths = rng.randint(1, 40), rng.randint(1, 40)
        fields: dict[str, Any] = {"priority": rng.randrange(3)}
        if rng.random() < 0.2:
            fields["deadline_ns"] = self.desk.now + rng.randrange(100_000_000)
        self.desk.submit(key, *lengths, rng.choice(METHODS), **fields)

    def launch(self) -> bool:
        plan = self.desk.scheduler.schedule()
        if plan is None:
            return False
        assert sum(span.num_tokens for span in plan.spans) <= self.token_budget, "over budget"
        assert sum(span.num_decided for span in plan.spans) <= self.logit_budget, "over budget"
        assert len({span.row for span in plan.spans}) == len(plan.spans), "a row runs twice"
        assert all(span.stop > span.start for span in plan.spans)
        self.flights.append((plan, {span.row: self.keys[span.row] for span in plan.spans}))
        return True

    def collect(self) -> None:
        plan, _ = self.flights.popleft()
        self.desk.scheduler.apply(plan, self.desk.decide(plan))

    def check(self) -> None:
        """The invariants: the scheduler's own, one end each, and rows of steps in flight kept."""
        scheduler = self.desk.scheduler
        scheduler.check_integrity()
        for _, owners in self.flights:
            assert owners.items() <= self.keys.items(), "a step in flight names a row let go"
        live = scheduler._requests.values()
        self.num_preempted += any(request.preemptions for request in live)
        self.desk.read(scheduler.emit())
        working = {request.key for request in live if request.ending is None}
        assert self.desk.tokens.keys() - working == self.desk.finishes.keys(), "an end is untold"

    def drain(self) -> None:
        """Everything ends; everyone was told once, and nothing is held."""
        for _ in range(3000):
            if not self.desk.scheduler.has_work:
                break
            self.desk.now += 1_000_000
            if (len(self.flights) > self.depth or not self.launch()) and self.flights:
                self.collect()
            self.check()
        assert not self.flights
        self.desk.run(0)


def churn(seed: int, *, overlaps: bool, num_operations: int = 250) -> bool:
    """A crowd from entering to leaving; whether anyone was preempted."""
    crowd = Crowd(random.Random(seed), overlaps=overlaps)
    for _ in range(num_operations):
        crowd.operate()
        crowd.check()
    crowd.drain()
    return crowd.num_preempted > 0


def churn_many(num_crowds: int, seed: int = 0, *, overlaps: bool) -> int:
    """Several crowds, one after the other; how many of them met a preemption."""
    return sum(churn(seed + offset, overlaps=overlaps) for offset in range(num_crowds))


@pytest.mark.parametrize("overlaps", [False, True])
def test_random_operations_keep_every_invariant(seed: int, overlaps: bool) -> None:
    assert churn_many(25, seed, overlaps=overlaps) > 0, "pages never ran short"


Broken = tuple[type, str, Callable[..., Any]]


def row_leaks() -> Broken:
    real = Planner.leave

    def leave(self: Planner, request: Request) -> None:
        has_row = request.row >= 0
        real(self, request)
        if has_row:
            self._free_rows.pop()

    return Planner, "leave", leave


def row_is_let_go_in_flight() -> Broken:
    """An ended request leaves at once, though a step in flight names its row."""
    real = Scheduler._end

    def end(self: Scheduler, request: Request, ending: Ending, now: int) -> None:
        self.planner.convoy.leave(request)
        num_steps, request.in_flight = request.in_flight, 0
        real(self, request, ending, now)
        request.in_flight = num_steps

    return Scheduler, "_end", end


def end_is_told_twice() -> Broken:
    real = OutputWriter.finish

    def finish(self: OutputWriter, key: int, finish: Finish) -> None:
        real(self, key, finish)
        real(self, key, finish)

    return OutputWriter, "finish", finish


def later_ending_wins() -> Broken:
    real = Scheduler._end

    def end(self: Scheduler, request: Request, ending: Ending, now: int) -> None:
        request.ending = None
        real(self, request, ending, now)

    return Scheduler, "_end", end


def end_is_not_told() -> Broken:
    real = OutputWriter.finish

    def finish(self: OutputWriter, key: int, finish: Finish) -> None:
        if finish.reason is not FinishReason.DEADLINE:
            real(self, key, finish)

    return OutputWriter, "finish", finish


def preempted_request_is_lost() -> Broken:
    real = Planner._preempt

    def preempt(self: Planner, request: Request) -> None:
        real(self, request)
        self.waiting.remove(request)

    return Planner, "_preempt", preempt


def preempted_request_keeps_its_pages() -> Broken:
    real = Planner._preempt

    def preempt(self: Planner, request: Request) -> None:
        pages = list(request.table.pages)
        real(self, request)
        request.table.pages = pages

    return Planner, "_preempt", preempt


def budget_is_overrun() -> Broken:
    real = StepDraft.__init__

    def init(self: StepDraft, limits: SchedulerLimits, num_rows: int) -> None:
        tokens, logits = limits.token_budget + 1, limits.logit_budget + 1
        real(self, replace(limits, token_budget=tokens, logit_budget=logits), num_rows)

    return StepDraft, "__init__", init


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("breaking", "words"),
    [
        (row_leaks, "rows leaked"),
        (row_is_let_go_in_flight, "a step in flight names a row let go"),
        (end_is_told_twice, "a second end"),
        (later_ending_wins, "after the end|a second end"),
        (end_is_not_told, "an end is untold"),
        (preempted_request_is_lost, "a request is lost"),
        (preempted_request_keeps_its_pages, "page 0: 0 references, 1 holders"),
        (budget_is_overrun, "over budget"),
    ],
)
def test_control_a_broken_scheduler_is_noticed(
    breaking: Callable[[], Broken], words: str, overlaps: bool
) -> None:
    owner, name, broken = breaking()
    with patch.object(owner, name, broken), pytest.raises(AssertionError, match=words):
        churn_many(25, overlaps=overlaps)
