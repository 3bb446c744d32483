"""The mailbox between the session and a request: merging, bounds, one terminal outcome."""

from __future__ import annotations

import asyncio

import pytest

from frontend.call import MAX_UNREAD_BYTES, Call
from frontend.messages import Canvas, Finish, FinishReason, Timings, TokenLogprobs, Usage
from frontend.rounds import Reader
from tidemill.runtime.errors import EngineDead, Overloaded

FINISH = Finish(FinishReason.LENGTH, None, "", Usage(), Timings())


class Wire:
    """What the mailbox told the engine client."""

    def __init__(self) -> None:
        self.released: list[tuple[list[int], bool]] = []
        self.stopped: list[tuple[int, int, str]] = []
        self.announced: list[Reader] = []
        self.is_busy = False

    def put(self, reader: Reader) -> None:
        self.announced.append(reader)
        if not self.is_busy:
            reader.wake()

    def back(self, reader: Reader) -> None:
        pass

    def call(self, *handles: int) -> Call:
        return Call(
            handles,
            release=lambda handles, abort: self.released.append((handles, abort)),
            stop=lambda *told: self.stopped.append(told),
            rounds=self,
        )


async def test_unread_steps_merge_into_one_delta_per_sequence() -> None:
    call = Wire().call(7, 8)
    for step in range(3):
        call.add_tokens(0, [step])
        call.add_logprobs(0, [TokenLogprobs((step,), (-1.0,), 1)])
        call.show_canvas(1, Canvas(0, (step,), (False,), step))
    first, second = await call.read()
    assert (first.index, first.token_ids, len(first.logprobs)) == (0, [0, 1, 2], 3)
    assert second.canvas is not None
    assert second.canvas.step == 2


async def test_a_canvas_that_tokens_have_overtaken_is_dropped() -> None:
    """It says what follows the tokens before it: behind newer ones it would stand too far right."""
    call = Wire().call(7)
    call.show_canvas(0, Canvas(8, (1, 2), (True, False), 1))
    call.add_tokens(0, [1])
    (overtaken,) = await call.read()
    assert (overtaken.token_ids, overtaken.canvas) == ([1], None)
    call.add_tokens(0, [2])
    call.show_canvas(0, Canvas(10, (3,), (False,), 2))
    (of_one_step,) = await call.read()
    assert of_one_step.canvas is not None
    assert of_one_step.canvas.block == 10


async def test_reading_waits_for_news() -> None:
    call = Wire().call(1)
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0)
    assert not reading.done()
    call.finish(0, FINISH)
    (delta,) = await reading
    assert delta.finish is FINISH
    assert not call._live


async def test_news_are_announced_once_and_read_when_they_may_be() -> None:
    wire = Wire()
    call = wire.call(1)
    wire.is_busy = True
    reading = asyncio.create_task(call.read())
    for step in range(3):
        call.add_tokens(0, [step])
        await asyncio.sleep(0)
    assert wire.announced == [call]
    assert not reading.done()
    assert call.wake()
    assert (await reading)[0].token_ids == [0, 1, 2]
    assert not call.wake(), "nobody waits"
    call.add_tokens(0, [3])
    assert wire.announced == [call, call]
    assert (await call.read())[0].token_ids == [3]


async def test_a_patient_reader_is_woken_for_the_last_finish() -> None:
    wire = Wire()
    call, arrived = wire.call(1, 2), list[int]()
    call.wait_for_all(arrived.append)
    reading = asyncio.create_task(call.read())
    for index in (0, 1):
        call.add_tokens(index, [index])
        call.add_tokens(index, [index])
        assert wire.announced == []
        call.finish(index, FINISH)
    first, second = await reading
    assert (first.token_ids, second.token_ids) == ([0, 0], [1, 1])
    assert wire.announced == [call]
    assert arrived == [0, 0, 1, 1]


async def test_a_patient_reader_is_woken_by_errors_and_by_a_mailbox_that_fills_up() -> None:
    wire = Wire()
    call = wire.call(1)
    call.wait_for_all(lambda index: None)
    for _ in range(100):
        call.add_tokens(0, [0] * 10_000)
        if wire.announced:
            await call.read()
            wire.announced.clear()
    assert call._live
    call.add_tokens(0, [1])
    call.fail(EngineDead("gone"))
    await call.read()
    with pytest.raises(EngineDead):
        await call.read()


async def test_what_arrived_is_read_before_the_error() -> None:
    call = Wire().call(1)
    call.add_tokens(0, [5])
    call.fail(EngineDead("gone"))
    call.fail(Overloaded("later errors do not count"))
    assert (await call.read())[0].token_ids == [5]
    with pytest.raises(EngineDead):
        await call.read()


async def test_closing_releases_what_still_runs_once() -> None:
    wire = Wire()
    call = wire.call(3, 4)
    call.finish(0, FINISH)
    call.close(abort=False)
    call.close()
    assert wire.released == [([4], False)]
    call.stop(1, 9, "x")
    assert wire.stopped == []


async def test_stop_names_the_handle_of_the_sequence() -> None:
    wire = Wire()
    wire.call(3, 4).stop(1, 9, "END")
    assert wire.stopped == [(4, 9, "END")]


async def test_a_full_mailbox_ends_its_request() -> None:
    wire = Wire()
    call = wire.call(1, 2)
    tokens = [0] * 10_000
    num_added = 0
    while call._live:
        call.add_tokens(0, tokens)
        num_added += 4 * len(tokens)
        assert num_added < MAX_UNREAD_BYTES + 100_000
    assert wire.released == [([1, 2], True)]
    await call.read()
    with pytest.raises(Overloaded) as caught:
        await call.read()
    assert caught.value.reason == "SLOW_READER"


async def test_control_a_mailbox_that_is_read_never_overflows() -> None:
    call = Wire().call(1)
    for _ in range(100):
        call.add_tokens(0, [0] * 10_000)
        await call.read()
    assert call._live


@pytest.mark.parametrize("how", ["tokens", "failure", "close"])
async def test_it_is_told_once_that_a_request_was_heard_of(how: str) -> None:
    call, told = Wire().call(7), []
    call.when_heard_of(lambda: told.append(how))
    assert told == []
    if how == "tokens":
        call.add_tokens(0, [1])
    elif how == "failure":
        call.fail(EngineDead("gone"))
    else:
        call.close()
    assert told == [how]
    call.add_tokens(0, [2])
    call.fail(EngineDead("gone"))
    call.close()
    assert told == [how]
