"""Bounds of the queue by number, tokens and time, and the time to retry after."""

from __future__ import annotations

import random

import pytest

from engine_service.core.policy.bounds import Found, QueueBounds, QueueLimits
from tests.unit.test_scheduler import Desk
from tidemill.runtime.errors import Overloaded


def bounds(requests: int = 10**9, tokens: int = 10**9, delay_s: float = 0.0) -> QueueBounds:
    return QueueBounds(QueueLimits(requests, tokens, delay_s))


def found(waiting: int, *, tokens: int = 0, ahead: int | None = None, running: int = 4) -> Found:
    return Found(waiting, tokens, waiting if ahead is None else ahead, running)


def test_the_bound_by_number_and_by_tokens_name_value_limit_and_flag() -> None:
    bounds(requests=3).check(found(2), 10)
    with pytest.raises(Overloaded, match=r"3 requests are waiting.*--max-queued-requests"):
        bounds(requests=3).check(found(3), 10)
    bounds(tokens=100).check(found(2, tokens=90), 10)
    with pytest.raises(Overloaded, match=r"have 91 tokens; with 10 more.*100.*--max-queued-tokens"):
        bounds(tokens=100).check(found(2, tokens=91), 10)
    bounds(tokens=100).check(found(0), 5000)  # an empty queue takes anybody


def test_the_expected_wait_follows_from_the_stay_of_the_rows() -> None:
    tried = bounds(delay_s=2.0)
    assert tried.wait_s(100, 4) is None
    tried.check(found(100), 1)  # nobody knows yet how long it would be
    for _ in range(200):
        tried.note(400_000_000, 0, is_given_up=False)
    assert tried.wait_s(10, 4) == pytest.approx(1.0)
    tried.check(found(20), 1)
    with pytest.raises(Overloaded, match=r"about 2\.1 s.*2 s.*--max-queue-delay-s") as refused:
        tried.check(found(21), 1)
    assert refused.value.retry_after_ms == 1050
    tried.check(found(100, ahead=3), 1)  # a key with few requests passes the others
    bounds(delay_s=0.0).check(found(10**6), 1)


def test_the_time_to_retry_after_is_bounded() -> None:
    tried = bounds(requests=5)
    with pytest.raises(Overloaded) as unknown:
        tried.check(found(5), 1)
    assert unknown.value.retry_after_ms == 1000
    for stay_ns, expected in ((1_000, 100), (4 * 10**9, 2500), (10**13, 30_000)):
        tried = bounds(requests=5)
        tried.note(stay_ns, 0, is_given_up=False)
        with pytest.raises(Overloaded) as refused:
            tried.check(found(5), 1)
        assert refused.value.retry_after_ms == expected


def test_the_estimate_is_right_for_random_stays(seed: int) -> None:
    """Rows that are refilled at once: how long the one behind n others waits, in truth."""
    rng, tried, rows = random.Random(seed), bounds(), 8
    ends = [rng.expovariate(1.0) for _ in range(rows)]
    starts = []
    for _ in range(4000):
        at = min(ends)
        starts.append(at)
        stay = rng.expovariate(1.0)
        ends[ends.index(at)] = at + stay
        tried.note(int(stay * 1e9), int(at * 1e9), is_given_up=False)
    truth = (starts[-1] - starts[0]) / len(starts) * 40
    expected = tried.wait_s(40, rows)
    assert expected is not None
    assert expected == pytest.approx(truth, rel=0.6)


def test_a_scheduler_measures_and_refuses_by_time() -> None:
    desk = Desk(max_rows=2, max_queue_delay_s=0.05)
    for key in range(1, 40):
        desk.submit(key, 3, 10)  # nothing is known yet
    while not desk.finishes:
        desk.step()
    with pytest.raises(Overloaded, match="max-queue-delay-s") as refused:
        desk.submit(50, 3, 10)
    assert 100 <= (refused.value.retry_after_ms or 0) <= 30_000
    desk.submit(51, 3, 10, fairness_key="b")
    while len(desk.finishes) < 40:
        desk.step()
    assert list(desk.finishes).index(51) < 6, "it had few before it"


def test_a_full_queue_makes_room_for_another_key() -> None:
    desk = Desk(queue=4, max_rows=1)
    for key in range(1, 5):
        desk.submit(key, 3, 10, fairness_key="a")
    (given_up,) = desk.submit(9, 3, 10, fairness_key="b")
    assert given_up.key == 4
    assert isinstance(given_up.error, Overloaded)
    assert "'a' has most" in given_up.error.message
    with pytest.raises(Overloaded, match="4 requests are waiting"):
        desk.submit(10, 3, 10, fairness_key="a")
    while desk.scheduler.has_work:
        desk.step()
    assert desk.finishes.keys() == {1, 2, 3, 9}


def test_a_burst_on_free_rows_waits_for_prompts_alone() -> None:
    """Rows stay for long, but nobody has to end for those who find one free."""
    desk = Desk(max_rows=8, max_queue_delay_s=0.05)
    for key in range(1, 9):
        desk.submit(key, 3, 40)
    desk.run()
    for key in range(11, 19):
        desk.submit(key, 3, 10)  # half of them before a step, half behind it
        if key == 14:
            desk.step()
    refused = 0
    for key in range(21, 60):
        try:
            desk.submit(key, 3, 10)
        except Overloaded:
            refused += 1
    assert refused, "whoever comes behind them waits for a row"
    desk.run()
