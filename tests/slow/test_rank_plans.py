"""What telling three followers a step costs rank 0, and when they have it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, NamedTuple

import pytest

from engine_service.core.step import PageAppend, SteadyRows, StepPlan
from engine_service.pipe import pack
from tests.service.test_ranks_watched import group, ready

pytestmark = [pytest.mark.slow, pytest.mark.alone]

ROWS, STEPS, GAP_S = 256, 300, 2e-3
BOUND_S = 100e-6
MOST_PIPES = 1.6
"""Of what packing a plan and writing it to three pipes takes, on a machine slower than that."""
LEAST, MOST = 3, 12
"""Rounds: the fewest, and how many a machine gets that other programs keep busy."""


def steady_plan(seq: int) -> StepPlan:
    """A decoding step of 256 rows, some of which get a page."""
    rows = list(range(ROWS))
    appends = tuple(PageAppend(row, 3, (row + 1000,)) for row in range(0, ROWS, 64))
    steady = SteadyRows(rows, [1000 + seq + row for row in rows], 1)
    return StepPlan(seq=seq, new_rows=(), page_appends=appends, own_spans=(), steady=steady)


@contextmanager
def readers() -> Iterator[list[IO[bytes]]]:
    """As many processes as there are followers, each asleep at a pipe."""
    command = [sys.executable, "-S", "-c", "import os\nwhile os.read(0, 1 << 16): pass"]
    with ExitStack() as opened:
        others = [
            opened.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for _ in range(3)
        ]
        yield [opened.enter_context(other.stdin) for other in others if other.stdin]


class Round(NamedTuple):
    """Seconds per step: of CPU until rank 0 goes on, of the clock until all have read it, and of
    CPU for a plan that is written to a pipe each, the least that telling it can be."""

    told: list[float]
    read: list[float]
    piped: list[float]

    @property
    def is_fast(self) -> bool:
        bound = max(BOUND_S, MOST_PIPES * statistics.median(self.piped))
        return statistics.median(self.told) < bound


def measure() -> Round:
    made = Round([], [], [])
    with group("", "", "") as (watcher, _), readers() as pipes:
        ready(watcher)
        plans = watcher.plans
        for seq in range(STEPS):
            time.sleep(GAP_S)  # what a fast step takes: the followers are asleep by then
            plan = steady_plan(seq)
            began, spent = time.perf_counter(), time.thread_time()
            plans.send(pack(plan))
            made.told.append(time.thread_time() - spent)
            while min(plans._shared.words[tail] for tail in plans._tails) < plans._head:
                time.sleep(0)
            made.read.append(time.perf_counter() - began)
            time.sleep(GAP_S)
            spent = time.thread_time()
            message = pack(plan)
            for pipe in pipes:
                os.write(pipe.fileno(), message)
            made.piped.append(time.thread_time() - spent)
    return made


def test_a_step_is_told_in_less_than_100_us(capsys: pytest.CaptureFixture[str]) -> None:
    """Of rank 0's own time: where there are fewer cores than ranks, those that it wakes take its
    core from it. The best round counts: other programs on the machine only ever add. A machine
    that needs as long for packing and three pipes is slow itself; there those are the measure."""
    rounds: list[Round] = []
    while len(rounds) < LEAST or (len(rounds) < MOST and not any(one.is_fast for one in rounds)):
        rounds.append(measure())
    best = min(rounds, key=lambda one: statistics.median(one.told))
    with capsys.disabled():
        for name, times in best._asdict().items():
            times = sorted(times)
            p50, p95 = statistics.median(times) * 1e6, times[int(0.95 * len(times))] * 1e6
            print(f"\n4 ranks, {ROWS} steady rows, {name}: p50 {p50:.0f} us, p95 {p95:.0f} us")
    assert any(one.is_fast for one in rounds)
