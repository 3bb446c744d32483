"""Readers are woken at once while there is time, and in rounds that merge when there is none.

Time is virtual: it passes where a test says so and where the event loop would wait.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from frontend.call import Announcements, Call
from frontend.rounds import Reader, Rounds

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


class One:
    """A reader that waits; what it does when it is woken may take time."""

    def __init__(self, woken: Callable[[], object], *, waits: bool = True) -> None:
        self._woken = woken
        self._waits = waits

    def wake(self) -> bool:
        self._woken()
        return self._waits


class AtOnce:
    """The control: everybody is woken at once."""

    def put(self, reader: Reader) -> None:
        reader.wake()

    def back(self, reader: Reader) -> None:
        pass


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_one_message_brings_is_woken_in_one_round_at_once(clock: Clock) -> None:
    async def test() -> None:
        rounds, woken = Rounds(), list[int]()
        for number in range(3):
            rounds.put(One(lambda number=number: woken.append(number)))  # type: ignore[misc]
        assert woken == []
        await turns()
        assert woken == [0, 1, 2]

    run(clock, test())


def test_after_a_short_round_the_next_one_is_at_once(clock: Clock) -> None:
    async def test() -> None:
        rounds, woken = Rounds(), list[int]()
        for number in range(5):
            reader = One(lambda number=number: woken.append(number))  # type: ignore[misc]
            rounds.put(reader)
            await turns()
            assert len(woken) == number + 1
            rounds.back(reader)
        assert clock.now == 0.0

    run(clock, test())


@pytest.mark.parametrize("waits", [True, False])
def test_after_a_long_round_news_wait_for_a_part_of_it_and_come_together(
    clock: Clock, waits: bool
) -> None:
    """A round lasts until the reader is back; one that did not wait for news is not waited for."""

    async def test() -> None:
        rounds, woken = Rounds(), list[float]()
        slow = One(lambda: None, waits=waits)
        rounds.put(slow)
        await turns()
        for _ in range(2):
            rounds.put(One(lambda: woken.append(clock.now)))
        await asyncio.sleep(4 * WORK_S)
        assert woken == ([] if waits else [0.0, 0.0])
        rounds.back(slow)
        await turns()
        assert len(woken) == (0 if waits else 2)
        await asyncio.sleep(2 * WORK_S)
        assert woken == ([pytest.approx(4.6 * WORK_S, rel=0.01)] * 2 if waits else [0.0, 0.0])

    run(clock, test())


def test_nobody_waits_long_for_a_client_that_does_not_read(clock: Clock) -> None:
    async def test() -> None:
        rounds, woken = Rounds(), list[float]()
        stuck = One(lambda: None)
        rounds.put(stuck)
        await turns()
        rounds.put(One(lambda: woken.append(clock.now)))
        await asyncio.sleep(0.1)
        assert woken == [pytest.approx(1.15 * 0.05, rel=0.01)]
        rounds.back(stuck)  # late, and of no round any more
        await turns()
        assert len(woken) == 1

    run(clock, test())


def test_a_large_round_leaves_turns_of_the_loop_to_others(clock: Clock) -> None:
    async def test() -> None:
        rounds, woken = Rounds(), list[int]()
        for number in range(100):
            rounds.put(One(lambda number=number: woken.append(number)))  # type: ignore[misc]
        counts = []
        while len(woken) < 100:
            await asyncio.sleep(0)
            counts.append(len(woken))
        assert woken == list(range(100))
        steps = [now - then for then, now in pairwise([0, *counts])]
        assert max(steps) == 8

    run(clock, test())


async def deliveries(clock: Clock, rounds: Announcements, steps: int) -> list[list[int]]:
    """What a reader gets that works for `WORK_S` on everything it reads, of an engine that sends a
    token each time the loop comes round: far too fast for it."""
    call = Call((1,), release=lambda *_: None, stop=lambda *_: None, rounds=rounds)
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
        seen = await deliveries(clock, Rounds() if in_rounds else AtOnce(), steps)
        assert [token for tokens in seen for token in tokens] == list(range(steps))
        assert len(seen) < steps / 4 if in_rounds else len(seen) == steps

    run(clock, test())


def test_news_that_come_while_a_reader_writes_wait_for_the_next_round(clock: Clock) -> None:
    """A write that ends later, as gRPC's do, would else bring each of them a message of its own."""

    async def test() -> None:
        rounds = Rounds()
        calls = [
            Call((1,), release=lambda *_: None, stop=lambda *_: None, rounds=rounds)
            for _ in range(2)
        ]
        sizes: list[int] = []

        async def read(call: Call, write_s: float) -> None:
            while len(sizes) < 8:
                (delta,) = await call.read()
                sizes.append(len(delta.token_ids))
                await asyncio.sleep(write_s)

        tasks = [
            asyncio.create_task(read(call, s))
            for call, s in zip(calls, (0.004, 0.012), strict=True)
        ]
        for step in range(100):
            for call in calls:
                call.add_tokens(0, [step])
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sizes[:2] == [1, 1]
        assert min(sizes[2:8]) >= 12, "a round took 12 ms and its rest one"

    run(clock, test())
