"""Texts are encoded on threads that are bounded, in lanes that do not wait for each other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from frontend import encode_pool
from frontend.encode_pool import LONG_CHARS, SHORT_CHARS, EncodePool
from frontend.tokenizer import TextTokenizer
from tests.service.frontends import write_tokenizer
from tests.waiting import until
from tidemill.runtime.errors import InvalidRequest, Overloaded


@pytest.fixture
async def pool() -> AsyncIterator[EncodePool]:
    made = EncodePool()
    yield made
    made.close()


def here() -> str:
    return threading.current_thread().name.partition("_")[0]


async def test_a_text_goes_where_its_length_says(pool: EncodePool) -> None:
    own = here()
    sizes = {0: own, SHORT_CHARS: own, SHORT_CHARS + 1: "encode", LONG_CHARS: "encode"}
    for size, thread in {**sizes, LONG_CHARS + 1: "encode-long", 10**9: "encode-long"}.items():
        assert await pool.run(here, size=size) == thread, size
    assert await pool.run(here) == "encode", "what has no length blocks, and stays off the loop"


async def test_nobody_waits_for_long_texts(pool: EncodePool) -> None:
    gate = threading.Event()
    long = [asyncio.create_task(pool.run(gate.wait, size=LONG_CHARS + 1)) for _ in range(3)]
    await asyncio.sleep(0)
    for size in (1, SHORT_CHARS + 1, LONG_CHARS):
        await pool.run(here, size=size)
    assert not any(task.done() for task in long)
    gate.set()
    assert await asyncio.gather(*long) == [True] * 3


async def test_a_lane_that_is_full_refuses(
    pool: EncodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_pool, "MOST_WAITING_CHARS", 5 * LONG_CHARS)
    gate = threading.Event()
    size = 2 * LONG_CHARS
    taken = [asyncio.create_task(pool.run(gate.wait, size=size)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await pool.run(here, size=size)
    error = caught.value
    assert (error.reason, error.retry_after_ms) == ("TOKENIZER_BUSY", 1000)
    assert (error.http_status, error.grpc_code) == (429, 8)
    assert await pool.run(here, size=SHORT_CHARS + 1) == "encode", "the other lane has room"
    gate.set()
    await asyncio.gather(*taken)
    await until(lambda: not pool._lanes[1]._num_chars)
    assert await pool.run(here, size=10 * size) == "encode-long", "one alone always fits"


async def test_what_is_cancelled_in_the_queue_is_never_begun(pool: EncodePool) -> None:
    gate, begun = threading.Event(), list[int]()
    first = asyncio.create_task(pool.run(gate.wait, size=LONG_CHARS + 1))
    waiting = [
        asyncio.create_task(pool.run(begun.append, number, size=LONG_CHARS + 1))
        for number in range(3)
    ]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    gate.set()
    await asyncio.gather(first, waiting[0], waiting[2])
    assert begun == [0, 2]
    await until(lambda: not pool._lanes[1]._num_chars)


async def test_a_cancelled_client_does_not_make_room_for_what_still_runs(pool: EncodePool) -> None:
    gate, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    running = asyncio.create_task(pool.run(work, size=LONG_CHARS + 1))
    await until(begun.is_set)  # what has not begun does make room
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert pool._lanes[1]._num_chars == LONG_CHARS + 1
    gate.set()
    await until(lambda: not pool._lanes[1]._num_chars)


async def test_many_short_texts_leave_others_their_turn(pool: EncodePool) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    for _ in range(100):
        await pool.run(int, size=SHORT_CHARS)
    task.cancel()
    assert turns > 40, "two at a time"


async def test_others_have_their_turns_while_a_long_text_is_encoded(
    pool: EncodePool, tmp_path: Path
) -> None:
    """The library's own way for one text lets no other thread run: 4 MB held up all streams."""
    write_tokenizer(tmp_path)
    tokenizer, text = TextTokenizer(tmp_path), "hello, harbour! " * 50_000
    began, turns = time.monotonic(), [time.monotonic()]
    work = pool.run(tokenizer.encode, text, size=len(text), add_special_tokens=False)
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.sleep(0.001)
        turns.append(time.monotonic())
    longest = max(later - one for one, later in pairwise(turns))
    assert longest < 0.5 * (time.monotonic() - began)
    assert tokenizer.decode(task.result(), skip_special_tokens=False) == text


def test_a_text_that_outlives_the_server_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    gate, made = threading.Event(), EncodePool()

    async def serve() -> None:
        task = asyncio.create_task(made.run(gate.wait, size=LONG_CHARS + 1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        made.close()

    asyncio.run(serve())
    gate.set()
    for lane in made._lanes:
        lane._thread.shutdown(wait=True)
    assert not caplog.records


@pytest.mark.parametrize("text", ["héllo\n", "<|user|>hello", "\U0001f600 ", "e\u0301"])
def test_long_texts_have_the_tokens_that_the_library_finds_one_by_one(
    text: str, tmp_path: Path
) -> None:
    exact, tokenizer = write_tokenizer(tmp_path), TextTokenizer(tmp_path)
    long = text * 1500
    expected = exact.encode(long, add_special_tokens=False).ids
    assert tokenizer.encode(long, add_special_tokens=False) == expected
    pair = exact.encode("hello", long)
    assert tokenizer.encode_input("hello", long)[0] == pair.ids
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        tokenizer.encode(long + "\ud800", add_special_tokens=False)
