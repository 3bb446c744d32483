"""The points of a run: one load each, with its arrivals or its streams. Pure; it asks nobody."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.bench.traffic.arrivals import played, starts
from tidemill.bench.traffic.asked import Drawn, Lengths, Played, Source
from tidemill.runtime.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`load` is requests per second, streams, or how many times as fast as its trace. `starts` are
    seconds from the beginning; empty: `streams` are kept open. Measured is from `warm_up_s` to
    `until_s`."""

    load: float
    source: Source
    starts: Sequence[float]
    streams: int
    warm_up_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked of all points."""

    lengths: Lengths
    vocab_size: int
    is_chat: bool
    seed: int
    cv: float
    warm_up_s: float
    seconds: float

    def drawn(self, number: int) -> Drawn:
        """Requests that no other point sends, so that no cache has seen them."""
        return Drawn(self.lengths, self.vocab_size, self.is_chat, f"{self.seed}/{number}")


def at_rates(wish: Wish, rates: Sequence[float]) -> list[Point]:
    """Open loop: arrivals by chance."""
    until_s = wish.warm_up_s + wish.seconds
    return [
        Point(
            load=rate,
            source=wish.drawn(number),
            starts=starts(rate, wish.cv, until_s, random.Random(f"{wish.seed}/{number}/starts")),
            streams=0,
            warm_up_s=wish.warm_up_s,
            until_s=until_s,
        )
        for number, rate in enumerate(rates)
    ]


def at_concurrencies(wish: Wish, counts: Sequence[int]) -> list[Point]:
    """Closed loop."""
    return [
        Point(
            load=count,
            source=wish.drawn(number),
            starts=(),
            streams=count,
            warm_up_s=wish.warm_up_s,
            until_s=wish.warm_up_s + wish.seconds,
        )
        for number, count in enumerate(counts)
    ]


def of_trace(wish: Wish, lines: Sequence[dict[str, Any]], speeds: Sequence[float]) -> list[Point]:
    """Open loop: the arrivals of a trace, to its end, which is a mean gap behind its last one.
    Raises InvalidRequest for one that is over before the warm-up is."""
    points = []
    for number, speed in enumerate(speeds):
        times = played([line["t_s"] for line in lines], speed)
        until_s = times[-1] * len(times) / (len(times) - 1) if times[-1] else 1.0
        if until_s <= wish.warm_up_s:
            raise InvalidRequest(
                f"the trace is over after {until_s:.1f} s, before --warm-up-s {wish.warm_up_s:g}",
                param="warm_up_s",
            )
        points.append(
            Point(
                load=speed,
                source=Played(lines, wish.drawn(number)),
                starts=times,
                streams=0,
                warm_up_s=wish.warm_up_s,
                until_s=until_s,
            )
        )
    return points
