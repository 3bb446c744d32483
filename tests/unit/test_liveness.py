"""When an engine behind an open session is taken for gone, and when it was we who were away."""

from __future__ import annotations

import asyncio
import time

import pytest

from frontend.liveness import Liveness
from tests.waiting import PATIENCE_S


async def heard_while(alive: Liveness, frames: asyncio.Queue[bool]) -> None:
    """A reader: every frame is heard, and False is the last one."""
    while await frames.get():
        alive.heard()


def test_silence_is_doubted_at_half_of_what_ends_a_session() -> None:
    alive = Liveness(1.0)
    alive.passed(0.5)
    assert alive.doubt() == ""
    alive.passed(0.25)
    assert alive.doubt() == "no sign of life for 0.8 s"
    alive.heard()
    assert alive.doubt() == ""


def test_the_sleep_of_this_process_is_not_the_silence_of_engines() -> None:
    alive = Liveness(10.0)
    for _ in range(8):
        alive.passed(3600.0)
    assert alive.doubt() == "", "of each look two ticks count"


async def test_who_says_nothing_is_gone() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await Liveness(1.0).watch(asyncio.create_task(asyncio.sleep(2 * PATIENCE_S)))
    assert 0.9 <= time.monotonic() - began < 0.5 * PATIENCE_S


async def test_frames_that_wait_when_this_process_wakes_are_heard_first() -> None:
    """Control: counted by the clock, the session would end."""
    alive, frames = Liveness(3.0), asyncio.Queue[bool]()
    watching = asyncio.create_task(alive.watch(asyncio.create_task(heard_while(alive, frames))))
    await asyncio.sleep(0.3)
    asyncio.get_running_loop().call_later(0.05, frames.put_nowait, True)
    time.sleep(3.5)  # noqa: ASYNC251 - the whole process stands still
    await asyncio.sleep(0.3)
    assert not watching.done()
    frames.put_nowait(False)
    await watching


async def test_the_watch_ends_as_the_reader_does() -> None:
    async def failing() -> None:
        raise ConnectionError("cut")

    with pytest.raises(ConnectionError, match="cut"):
        await Liveness(1.0).watch(asyncio.create_task(failing()))
