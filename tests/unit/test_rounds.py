"""Readers are woken at once while there is time, and in rounds that merge when there is none.

Time is virtual: it passes where a test says so and where the event loop would wait.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from frontend.call import Call
from frontend.rounds import Rounds

WORK_S = 0.01


class Clock:
    """Seconds since the start of a test."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Moves the clock on instead of waiting."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        self._clock.now += max(0.0, timeout or 0.0)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop of virtual time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Selector(clock))
        self._virtual = clock

    def time(self) -> float:
        return self._virtual.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("frontend.rounds.time", made)
    return made


def run(clock: Clock, test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
        runner.run(test)


def test_what_one_message_brings_is_woken_in_one_round_at_once(clock: Clock) -> None:
    async def test() -> None:
        rounds, woken = Rounds(), list[int]()
        for number in range(3):
            rounds.put(lambda number=number: woken.append(number))  # type: ignore[misc]
        assert woken == []
        await asyncio.sleep(0)
        assert woken == [0, 1, 2]

    run(clock, test())


def test_after_a_short_round_the_next_one_is_at_once(clock: Clock) -> None:
    async def test() -> None:
        rounds, woken = Rounds(), list[int]()
        for number in range(5):
            rounds.put(lambda number=number: woken.append(number))  # type: ignore[misc]
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(woken) == number + 1
        assert clock.now == 0.0

    run(clock, test())


def test_after_a_long_round_news_wait_for_a_quarter_of_it_and_come_together(clock: Clock) -> None:
    def work() -> None:
        clock.now += 4 * WORK_S

    async def test() -> None:
        rounds, woken = Rounds(), list[float]()
        rounds.put(work)
        await asyncio.sleep(0)
        began = clock.now
        for _ in range(2):
            rounds.put(lambda: woken.append(clock.now - began))
            for _ in range(3):
                await asyncio.sleep(0)
            assert woken == []
        await asyncio.sleep(2 * WORK_S)
        assert woken == [pytest.approx(WORK_S, rel=0.01)] * 2
        assert woken[0] == woken[1]

    run(clock, test())


async def deliveries(
    clock: Clock, announce: Callable[[Callable[[], None]], None], steps: int
) -> list[list[int]]:
    """What a reader gets that works for `WORK_S` on everything it reads, of an engine that sends a
    token each time the loop comes round: far too fast for it."""
    call = Call((1,), release=lambda *_: None, stop=lambda *_: None, announce=announce)
    seen: list[list[int]] = []

    async def read() -> None:
        while sum(map(len, seen)) < steps:
            (delta,) = await call.read()
            seen.append(delta.token_ids)
            clock.now += WORK_S  # the work of all other streams

    reading = asyncio.create_task(read())
    for step in range(steps):
        call.add_tokens(0, [step])
        await asyncio.sleep(0.0002)
    await reading
    return seen


@pytest.mark.parametrize("in_rounds", [True, False])
def test_a_reader_that_is_too_slow_gets_fewer_and_larger_deltas(
    clock: Clock, in_rounds: bool
) -> None:
    """Without rounds, the control, every token is a delta of its own."""
    steps = 60

    async def test() -> None:
        announce = Rounds().put if in_rounds else lambda wake: wake()
        seen = await deliveries(clock, announce, steps)
        assert [token for tokens in seen for token in tokens] == list(range(steps))
        assert len(seen) < steps / 4 if in_rounds else len(seen) == steps

    run(clock, test())
