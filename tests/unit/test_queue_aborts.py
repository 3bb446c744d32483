"""The estimate of a newcomer's wait where callers give rows up, beside two simpler ones.

Rows are refilled at once, in virtual time; the truth is when so many of them have become free.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable

import pytest

from engine_service.core.messages import Abort, FinishReason
from engine_service.core.policy.bounds import QueueBounds, QueueLimits
from tests.unit.test_scheduler import Desk

ROWS, AHEAD, STEP_S, SECONDS, SEED = 64, 48, 0.01, 40.0, 5
LIMITS = QueueLimits(1, 1, 0.0)
Stay = Callable[[random.Random], tuple[float, float]]


class EqualStays(QueueBounds):
    """Every row that is given back counts alike."""

    def note(self, stay_ns: int, now_ns: int, *, is_given_up: bool) -> None:
        super().note(stay_ns, now_ns, is_given_up=False)


class Finished(QueueBounds):
    """Time held over the number of those that finished."""

    _held = _num = 0.0

    def note(self, stay_ns: int, now_ns: int, *, is_given_up: bool) -> None:
        if not is_given_up:
            self._held, self._num = self._held * 31 / 32, self._num * 31 / 32 + 1
        self._held += stay_ns
        self._stay_ns = self._held / self._num if self._num else math.inf


def needs(rng: random.Random) -> float:
    return rng.uniform(0.5, 1.5)


def patient(rng: random.Random) -> tuple[float, float]:
    """(how long the answer takes, how long its caller waits for it)"""
    return needs(rng), math.inf


def impatient(rng: random.Random) -> tuple[float, float]:
    return needs(rng), rng.expovariate(1.0)


def leaving(rng: random.Random) -> tuple[float, float]:
    return math.inf, rng.uniform(0.2, 0.4)


def mostly_leaving(rng: random.Random) -> tuple[float, float]:
    return needs(rng), 0.05 * rng.random() if rng.random() < 0.75 else math.inf


def off_by(tried: QueueBounds, stay: Stay, seed: int = SEED) -> float:
    """The median of what it says over what is true."""
    rng = random.Random(seed)
    rows = [(0.0, *stay(rng)) for _ in range(ROWS)]
    freed: list[float] = []
    said: list[tuple[float, float]] = []
    for tick in range(round(SECONDS / STEP_S)):
        now = tick * STEP_S
        for row, (began, takes, patience) in enumerate(rows):
            if now - began >= min(takes, patience):
                held_ns = round((now - began) * 1e9)
                tried.note(held_ns, round(now * 1e9), is_given_up=patience < takes)
                rows[row] = (now, *stay(rng))
                freed.append(now)
        wait_s = tried.wait_s(AHEAD, ROWS)
        if now > 3.0 and wait_s is not None:
            said.append((now, wait_s))
    ratios = []
    for now, wait_s in said:
        place = bisect_right(freed, now) + AHEAD
        if place < len(freed):
            ratios.append(wait_s / (freed[place] - now))
    return statistics.median(ratios)


@pytest.mark.parametrize("stay", [patient, impatient, leaving, mostly_leaving])
def test_it_is_right_however_many_leave(stay: Stay) -> None:
    """They free rows as those do whose answer is done."""
    assert 0.75 < off_by(QueueBounds(LIMITS), stay) < 1.33
    if stay is not patient:
        assert off_by(Finished(LIMITS), stay) > 1.9, "control: they look as if they held up others"


@pytest.mark.parametrize("held_s", [0.001, 0.3, 3.0, 1000.0])
@pytest.mark.parametrize("kind", [QueueBounds, EqualStays])
def test_a_wave_of_aborts_says_little(kind: type[QueueBounds], held_s: float) -> None:
    """A client leaves with all that it has, whether that has just begun or is very old."""
    tried, now_ns = kind(LIMITS), 0
    for _ in range(100):
        now_ns += 20_000_000
        tried.note(10**9, now_ns, is_given_up=False)
    for number in range(48):
        tried.note(round(held_s * 1e9), now_ns + number * 100_000, is_given_up=True)
    wait_s = tried.wait_s(ROWS, ROWS)
    assert wait_s is not None
    is_right = 0.85 < wait_s < 1.15
    assert is_right is (kind is QueueBounds), wait_s


def test_a_first_abort_is_not_the_measure_of_what_follows() -> None:
    tried = QueueBounds(LIMITS)
    tried.note(1000, 0, is_given_up=True)
    for number in range(1, 10):
        tried.note(10**9, number * 10**9, is_given_up=False)
    assert tried.wait_s(1, 1) == pytest.approx(0.9, rel=0.01)


@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.STOP_STRING])
def test_a_scheduler_tells_who_was_given_up(reason: FinishReason) -> None:
    """All rows end at once: by callers who leave, or (the control) by texts that were found."""
    desk = Desk(max_rows=16, queue=100, num_pages=500)
    bounds = desk.scheduler.gate._bounds
    for key in range(1, 65):
        desk.submit(key, 3, 40)
    desk.run()
    before = bounds.wait_s(16, 16)
    for key in range(101, 117):
        desk.submit(key, 3, 40)
    desk.step()
    for key in range(101, 117):
        desk.scheduler.abort(Abort(key, reason))
    desk.run()
    after = bounds.wait_s(16, 16)
    assert before is not None
    assert after is not None
    assert (after > 0.85 * before) is (reason is FinishReason.ABORTED), (before, after)
