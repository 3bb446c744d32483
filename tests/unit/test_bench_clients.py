"""Client processes of `bench serve`: as many as have work, and what they know of who is late."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_bench_traffic import TARGET
from tidemill.bench.traffic import clients
from tidemill.bench.traffic.answer import TIMEOUT, Answer
from tidemill.bench.traffic.arrivals import gaps, starts
from tidemill.bench.traffic.asked import Drawn, Lengths
from tidemill.bench.traffic.client import Share, _Client
from tidemill.bench.traffic.options import ServeOptions, points_of
from tidemill.commands import bench
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest

SEEDS = 2000


def share(**rest: Any) -> Share:
    target = replace(TARGET, timeout_s=0.2)
    return Share(target=target, source=Drawn(Lengths(4, 4, 0.0), 100, False, "0"), **rest)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_as_many_requests_come_as_were_asked_for(cv: float, seed: int) -> None:
    """In the first second as in any other, bursts or not."""
    rate, until_s = 2.0, 30.0
    drawn = [starts(rate, cv, until_s, random.Random(f"{seed}/{n}")) for n in range(SEEDS)]
    whole = [len(found) for found in drawn]
    first = [sum(at < 1.0 for at in found) for found in drawn]
    for counts, wanted in ((whole, rate * until_s), (first, rate)):
        error = statistics.pstdev(counts) / SEEDS**0.5
        assert abs(statistics.fmean(counts) - wanted) <= 5 * error + 1e-9


def test_control_a_run_that_begins_in_any_gap_alike_gets_too_many(seed: int) -> None:
    def begun(rng: random.Random) -> int:
        drawn = gaps(2.0, 4.0, rng)
        at, count = rng.random() * next(drawn), 0
        while at < 30.0:
            at, count = at + next(drawn), count + 1
        return count

    counts = [begun(random.Random(f"{seed}/{n}")) for n in range(SEEDS)]
    assert statistics.fmean(counts) - 60 > 5 * statistics.pstdev(counts) / SEEDS**0.5


@pytest.mark.parametrize(
    ("work", "processes"),
    [
        ({"streams": 1}, 1),
        ({"streams": 3}, 3),
        ({"streams": 9}, 4),
        ({"starts": [0.1, 0.2], "numbers": [0, 1]}, 2),
        ({}, 1),
    ],
)
def test_no_process_is_without_work(
    work: dict[str, Any], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How busy it was would be told of the moment in which it ended."""
    seen = []

    def none(whole: Share, count: int) -> Iterator[Share]:
        seen.append(count)
        return iter(())

    monkeypatch.setattr(clients, "shares", none)
    with pytest.raises(ValueError, match="empty"):
        clients.run_clients(share(**work), 4)
    assert seen == [processes]


class SlowFace:
    """Two chunks, and no end."""

    def write(self, asked: Any) -> Any:
        return asked

    async def ask(self, content: Any, answer: Answer) -> None:
        for _ in range(2):
            answer.chunks.append(time.monotonic())
        await asyncio.sleep(30)

    async def close(self) -> None:
        """Nothing to close."""


async def test_chunks_of_a_request_that_runs_out_of_time_count() -> None:
    client = _Client(share(streams=1))
    client._faces = [SlowFace()]
    assert not await client._one(None, time.monotonic())
    (answer,) = client._answers
    assert (answer.status, answer.output_tokens) == (TIMEOUT, 2)
    assert answer.said == "no end within 0.2 s"


def test_addresses_may_have_blanks_around_them_and_know_no_frontends() -> None:
    assert ServeOptions(url="http://a, https://b ").urls == ("http://a", "https://b")
    points_of(ServeOptions(url="http://a, https://b"))
    with pytest.raises(InvalidRequest, match="frontends is for services that this starts"):
        points_of(ServeOptions(url="http://a", frontends=4))


def test_a_picture_without_a_place_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="is no folder: make it first"):
        bench.run(["serve", "--url=http://127.0.0.1:1", f"--plot={tmp_path / 'no' / 'x.png'}"])
