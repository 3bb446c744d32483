"""Readers are woken at once while there is time, and in rounds that merge when there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from frontend.call import Call
from frontend.rounds import Rounds

WORK_S = 0.01


async def test_what_one_message_brings_is_woken_in_one_round_at_once() -> None:
    rounds, woken = Rounds(), list[int]()
    for number in range(3):
        rounds.put(lambda number=number: woken.append(number))  # type: ignore[misc]
    assert woken == []
    await asyncio.sleep(0)
    assert woken == [0, 1, 2]


async def test_after_a_short_round_the_next_one_is_at_once() -> None:
    rounds, woken = Rounds(), list[int]()
    for number in range(5):
        rounds.put(lambda number=number: woken.append(number))  # type: ignore[misc]
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(woken) == number + 1


async def test_after_a_long_round_news_wait_for_a_quarter_of_it_and_come_together() -> None:
    rounds, woken = Rounds(), list[float]()
    rounds.put(lambda: time.sleep(4 * WORK_S))
    await asyncio.sleep(0)
    began = time.monotonic()
    for _ in range(2):
        rounds.put(lambda: woken.append(time.monotonic() - began))
        for _ in range(3):
            await asyncio.sleep(0)
        assert woken == []
    await asyncio.sleep(2 * WORK_S)
    assert len(woken) == 2
    assert woken[0] >= WORK_S - 0.002
    assert woken[1] - woken[0] < 0.002


async def deliveries(announce: Callable[[Callable[[], None]], None], steps: int) -> list[list[int]]:
    """What a reader gets that works for `WORK_S` on everything it reads, of an engine that sends a
    token each time the loop comes round: far too fast for it."""
    call = Call((1,), release=lambda *_: None, stop=lambda *_: None, announce=announce)
    seen: list[list[int]] = []

    async def read() -> None:
        while sum(map(len, seen)) < steps:
            (delta,) = await call.read()
            seen.append(delta.token_ids)
            time.sleep(WORK_S)  # noqa: ASYNC251 (the work of all other streams)

    reading = asyncio.create_task(read())
    for step in range(steps):
        call.add_tokens(0, [step])
        await asyncio.sleep(0.0002)
    await asyncio.wait_for(reading, 10)
    return seen


@pytest.mark.parametrize("in_rounds", [True, False])
async def test_a_reader_that_is_too_slow_gets_fewer_and_larger_deltas(in_rounds: bool) -> None:
    """Without rounds, the control, every token is a delta of its own."""
    steps = 60
    announce = Rounds().put if in_rounds else lambda wake: wake()
    seen = await deliveries(announce, steps)
    assert [token for tokens in seen for token in tokens] == list(range(steps))
    assert (len(seen) < steps / 2) is in_rounds, len(seen)
