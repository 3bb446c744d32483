"""Allowances against a clock that the test turns, and a model that adds up every second."""

from __future__ import annotations

import random

import pytest

from tidemill.security.allowance import Allowance


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_minutes_worth_at_once_then_one_by_one(clock: Clock) -> None:
    allowed = Allowance(60, clock)
    for _ in range(60):
        assert allowed.wait_s("a") == 0
        allowed.take("a", 1)
    assert allowed.left("a") == 0
    assert allowed.wait_s("a") == pytest.approx(1)
    assert allowed.reset_s("a") == pytest.approx(60)
    clock.now += 0.99
    assert allowed.wait_s("a") > 0
    clock.now += 0.02
    assert allowed.wait_s("a") == 0
    clock.now += 3600
    assert allowed.left("a") == 60, "no more than a minute's worth is saved up"


def test_debts_are_paid_before_anything_else_is_given(clock: Clock) -> None:
    allowed = Allowance(60, clock)
    allowed.take("a", 180)
    assert allowed.wait_s("a") == pytest.approx(121)
    clock.now += 120
    assert allowed.wait_s("a") == pytest.approx(1)
    assert allowed.left("a") == 0
    clock.now += 1.001
    assert allowed.wait_s("a") == 0


def test_a_neighbour_notices_nothing(clock: Clock) -> None:
    allowed = Allowance(10, clock)
    allowed.take("a", 1000)
    assert allowed.wait_s("b") == 0
    assert allowed.left("b") == 10


def test_a_clock_that_goes_back_gives_nothing(clock: Clock) -> None:
    allowed = Allowance(60, clock)
    allowed.take("a", 60)
    clock.now -= 50
    assert allowed.left("a") == 0
    clock.now += 1
    assert allowed.left("a") == 1


@pytest.mark.parametrize("seed", range(4))
def test_never_more_than_the_rate_and_a_minutes_worth(clock: Clock, seed: int) -> None:
    """Whatever the order of requests: what is given in any stretch is bounded by its length."""
    drawn, allowed, given = random.Random(seed), Allowance(120, clock), []
    for _ in range(3000):
        clock.now += drawn.expovariate(3.0)
        if not allowed.wait_s("a"):
            allowed.take("a", 1)
            given.append(clock.now)
    assert len(given) > 1000
    for length in (1, 50, 300, 900):
        spans = zip(given, given[length:], strict=False)
        assert all(length <= 120 + 2.0 * (last - first) + 1 for first, last in spans)


def test_many_addresses_take_bounded_memory_and_free_nobody(clock: Clock) -> None:
    """10,000 and more come by, each with a request; who owes and keeps asking is remembered."""
    allowed = Allowance(60, clock, max_names=1000)
    allowed.take("spender", 600)
    for number in range(20_000):
        clock.now += 0.001
        if number % 100 == 0:
            assert allowed.wait_s("spender") > 0
        allowed.take(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1)
        assert len(allowed) <= 1000
    assert allowed.wait_s("spender") > 0


def test_who_missed_nothing_for_a_minute_is_forgotten(clock: Clock) -> None:
    allowed = Allowance(60, clock)
    for number in range(10_000):
        allowed.take(f"{number}", 1)
    assert len(allowed) == 10_000
    clock.now += 61
    allowed.take("next", 1)
    assert len(allowed) == 1
