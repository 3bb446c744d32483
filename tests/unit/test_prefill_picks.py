"""Picks of prefill engines that no report knows yet, and what counting them does for a burst."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable

from frontend.fleet.least_loaded import least_loaded
from frontend.fleet.prefill_picks import ON_THE_WAY_S, PrefillPicks
from frontend.fleet.views import EngineView, RequestView

SHORT, LONG = b"four" * 10, b"four" * 100


def test_a_pick_counts_until_it_ends_or_a_report_had_the_time_to_know_it() -> None:
    picks = PrefillPicks()
    assert picks.unknown(-float("inf")) == (0, 0)
    first = picks.add({SHORT, LONG}, 10.0)
    picks.add({LONG}, 10.1)
    third = picks.add({SHORT}, 10.2)
    assert picks.unknown(9.9) == (4, 220)
    assert picks.unknown(10.2) == (4, 220), "it may have crossed all of them"
    third()
    assert picks.unknown(10.2) == (3, 210)
    assert picks.unknown(10.0 + ON_THE_WAY_S) == (1, 100)
    for end in (first, third):
        end()  # of what is not counted any more
    assert picks.unknown(10.0 + ON_THE_WAY_S) == (1, 100)
    assert picks.unknown(10.1 + ON_THE_WAY_S) == (0, 0)


class Engine:
    """Computes one prompt after the other, `COST_S` each, and reports four times a second."""

    COST_S, MOST = 0.05, 16

    def __init__(self, address: str) -> None:
        self.address, self.picks, self.ends_at = address, PrefillPicks(), [0.0]
        self.reported, self.reported_at = 0, 0.0
        self.waits: list[float] = []

    def report(self, now: float) -> None:
        self.reported, self.reported_at = sum(end > now for end in self.ends_at), now

    def arrive(self, now: float) -> float:
        begins = max(now, self.ends_at[-1])
        self.waits.append(begins - now)
        self.ends_at.append(begins + self.COST_S)
        return self.ends_at[-1]

    def view(self, counts: bool) -> EngineView:
        sent = self.picks.unknown(self.reported_at)[0] if counts else 0
        return EngineView(self.address, waiting=self.reported, max_rows=self.MOST, sent=sent)


def slowest(seed: int, counts: bool) -> float:
    """The mean wait of the last tenth, in seconds: bursts of 12 requests, 70 % of what four engines
    can do, in virtual time. A request reaches its engine 20 ms after it was picked."""
    rng, engines = random.Random(seed), [Engine(str(n)) for n in range(4)]
    turns: list[tuple[float, int, Callable[[float], None]]] = []
    number = 0

    def at(when: float, what: Callable[[float], None]) -> None:
        nonlocal number
        number += 1
        heapq.heappush(turns, (when, number, what))

    def reports(engine: Engine) -> Callable[[float], None]:
        def report(now: float) -> None:
            engine.report(now)
            at(now + 0.25, report)

        return report

    def burst(now: float) -> None:
        for _ in range(12):
            request = RequestView(number)
            chosen = least_loaded([one.view(counts) for one in engines], request)
            engine = engines[int(chosen.address)]
            end = engine.picks.add({SHORT}, now)
            at(now + 0.02, lambda then, e=engine, end=end: at(e.arrive(then), lambda _: end()))
        at(now + rng.expovariate(0.7 * 4 / (12 * Engine.COST_S)), burst)

    for engine in engines:
        at(0.25 * rng.random(), reports(engine))
    at(0.0, burst)
    now = 0.0
    while now < 60.0:
        now, _, what = heapq.heappop(turns)
        what(now)
    waits = sorted(wait for one in engines for wait in one.waits)
    tail = waits[-len(waits) // 10 :]
    return sum(tail) / len(tail)


def test_a_burst_is_shared() -> None:
    """The control is what happens to one that only the reports are asked about. Seeds are fixed:
    the ratio of two tails is the test's, chance is not."""
    counted, control = (
        statistics.mean(slowest(seed, counts) for seed in range(6)) for counts in (True, False)
    )
    assert counted < 0.7 * control, (counted, control)
