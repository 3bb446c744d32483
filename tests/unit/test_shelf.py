"""The shelf keeps what a slow and obvious model of it keeps, and says what became of the rest."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from frontend.background import Background
from frontend.shelf import Shelf, new_replica
from tidemill.runtime.errors import NotFound, Overloaded

MOST, BYTES, KEEP_S = 5, 100, 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shelf(clock: Clock, replica: str = "0123abcd", keep_s: float = KEEP_S) -> Shelf[int]:
    return Shelf(
        "box", "box", replica, max_entries=MOST, max_bytes=BYTES, keep_s=keep_s, clock=clock
    )


class Reference:
    """A list, least recently used first, of [name, kept, bytes, end or None while being made]."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.rows: list[list[object]] = []

    def put(self, name: str, kept: int, num_bytes: int, settles: bool) -> None:
        self.rows = [row for row in self.rows if row[0] != name]
        end = self.clock.now + KEEP_S if settles else None
        self.rows.append([name, kept, num_bytes, end])
        self.tidy()

    def get(self, name: str) -> int | None:
        self.tidy()
        for row in self.rows:
            if row[0] == name:
                self.rows.remove(row)
                self.rows.append(row)
                return int(str(row[1]))
        return None

    def tidy(self) -> None:
        self.rows = [r for r in self.rows if r[3] is None or float(str(r[3])) > self.clock.now]
        while len(self.rows) > MOST or sum(int(str(row[2])) for row in self.rows) > BYTES:
            oldest = next((row for row in self.rows if row[3] is not None), None)
            if oldest is None:
                return
            self.rows.remove(oldest)


def run(seed: int, *, forgets_use: bool = False) -> None:
    """A thousand random steps on both. `forgets_use`: a model that drops by age, to be caught."""
    rng, clock = random.Random(seed), Clock()
    real, model = shelf(clock), Reference(clock)
    names = [real.new_id() for _ in range(12)]
    for step in range(1000):
        name, size = rng.choice(names), rng.randrange(1, 40)
        clock.now += rng.choice((0.0, 0.0, 1.0, 4.0))
        kind = rng.randrange(4)
        if kind == 0:
            real.settle(name, step, size)
            model.put(name, step, size, settles=True)
        elif kind == 1 and rng.random() < 0.3:
            model.rows = [row for row in model.rows if row[0] != name]
            made = [row for row in model.rows if row[3] is None]
            if len(made) >= MOST or sum(int(str(row[2])) for row in made) + size > BYTES:
                with pytest.raises(Overloaded):
                    real.open(name, step, size)
            else:
                real.open(name, step, size)
                model.put(name, step, size, settles=False)
        else:
            rows = list(model.rows)
            expected = model.get(name)
            if forgets_use:
                model.rows = [row for row in rows if row in model.rows]
            if expected is None:
                with pytest.raises(NotFound):
                    real.get(name)
            else:
                assert real.get(name) == expected, (seed, step)


@pytest.mark.parametrize("number", range(8))
def test_it_keeps_what_the_model_keeps(seed: int, number: int) -> None:
    run(seed + number)


def test_a_model_that_drops_by_age_is_caught() -> None:
    def run_all() -> None:
        for number in range(8):
            run(number, forgets_use=True)

    with pytest.raises((AssertionError, NotFound, pytest.fail.Exception)):
        run_all()


def test_the_words_for_what_is_missing() -> None:
    clock = Clock()
    here, there = shelf(clock), shelf(clock, "76543210", float("inf"))
    name = here.new_id()
    with pytest.raises(NotFound, match="held by the frontend 0123abcd and this is 76543210") as far:
        there.get(name, param="previous")
    assert (far.value.reason, far.value.param) == ("HELD_BY_ANOTHER_FRONTEND", "previous")
    with pytest.raises(NotFound, match="longer ago than 10 s, deleted, or dropped") as near:
        here.get(name)
    assert near.value.reason == "NOT_FOUND"
    for odd in ("", "box_1", name[:-1], name.upper(), "x" * 5000):
        with pytest.raises(NotFound, match="never kept, deleted") as unknown:
            there.get(odd)
        assert len(unknown.value.message) < 400


def test_ids_are_not_given_twice() -> None:
    one = shelf(Clock())
    assert len({one.new_id() for _ in range(1000)}) == 1000
    assert new_replica() != new_replica()


def test_what_is_removed_makes_room() -> None:
    one = shelf(Clock())
    names = [one.new_id() for _ in range(MOST)]
    for number, name in enumerate(names):
        one.open(name, number, 1)
    with pytest.raises(Overloaded, match="5 boxs"):
        one.open(one.new_id(), 9, 1)
    assert one.remove(names[2]) == 2
    one.open(one.new_id(), 9, BYTES - MOST + 1)
    with pytest.raises(Overloaded, match="100 bytes"):
        one.open(names[2], 2, 1)


async def test_work_in_the_background(caplog: pytest.LogCaptureFixture) -> None:
    background, ended = Background(), []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fails() -> None:
        raise ZeroDivisionError("a bug")

    for name in "abc":
        background.start(name, work(name))
    await asyncio.sleep(0)
    await background.cancel("b")
    await background.cancel("b")
    assert ended == ["b"]
    with caplog.at_level(logging.ERROR, "tidemill.frontend"):
        background.start("d", fails())
        await asyncio.sleep(0)
        await background.close()
    assert sorted(ended) == ["a", "b", "c"]
    assert "ZeroDivisionError" in caplog.text
