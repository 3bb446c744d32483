"""What telling three followers a step costs rank 0, and when they have it."""

from __future__ import annotations

import statistics
import time

import pytest

from engine_service.core.step import PageAppend, SteadyRows, StepPlan
from engine_service.pipe import pack
from tests.service.test_ranks_watched import group, ready

pytestmark = [pytest.mark.slow, pytest.mark.alone]

ROWS, STEPS, GAP_S = 256, 300, 2e-3
BOUND_S = 100e-6
LEAST, MOST = 3, 12
"""Rounds: the fewest, and how many a machine gets that other programs keep busy."""


def steady_plan(seq: int) -> StepPlan:
    """A decoding step of 256 rows, some of which get a page."""
    rows = list(range(ROWS))
    appends = tuple(PageAppend(row, 3, (row + 1000,)) for row in range(0, ROWS, 64))
    steady = SteadyRows(rows, [1000 + seq + row for row in rows], 1)
    return StepPlan(seq=seq, new_rows=(), page_appends=appends, own_spans=(), steady=steady)


def measure() -> tuple[list[float], list[float]]:
    """Seconds of CPU until rank 0 goes on, and of the clock until all have read it, per step."""
    told, read = [], []
    with group("", "", "") as (watcher, _):
        ready(watcher)
        plans = watcher.plans
        for seq in range(STEPS):
            time.sleep(GAP_S)  # what a fast step takes: the followers are asleep by then
            plan = steady_plan(seq)
            began, spent = time.perf_counter(), time.thread_time()
            plans.send(pack(plan))
            told.append(time.thread_time() - spent)
            while min(plans._shared.words[tail] for tail in plans._tails) < plans._head:
                time.sleep(0)
            read.append(time.perf_counter() - began)
    return told, read


def is_fast(rounds: list[tuple[list[float], list[float]]]) -> bool:
    return min(statistics.median(told) for told, _ in rounds) < BOUND_S


def test_a_step_is_told_in_less_than_100_us(capsys: pytest.CaptureFixture[str]) -> None:
    """Of rank 0's own time: where there are fewer cores than ranks, those that it wakes take its
    core from it. The best round counts: other programs on the machine only ever add."""
    rounds: list[tuple[list[float], list[float]]] = []
    while len(rounds) < LEAST or (len(rounds) < MOST and not is_fast(rounds)):
        rounds.append(measure())
    told, read = min(rounds, key=lambda pair: statistics.median(pair[0]))
    with capsys.disabled():
        for name, times in (("told", told), ("read by all", read)):
            times = sorted(times)
            p50, p95 = statistics.median(times) * 1e6, times[int(0.95 * len(times))] * 1e6
            print(f"\n4 ranks, {ROWS} steady rows, {name}: p50 {p50:.0f} us, p95 {p95:.0f} us")
    assert is_fast(rounds)
