"""When requests begin: arrival processes as functions of a rate and a source of chance.

An open loop sends when the process says so, whatever the server does. Times are seconds from the
start of the run. It does not know what is sent.
"""

from __future__ import annotations

import random
from collections.abc import Iterator


def gaps(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Endless times between arrivals, independent, with mean 1 / `rate` and `cv` as their
    coefficient of variation (standard deviation over mean): 0 is a metronome, 1 a Poisson process,
    above 1 requests come in bursts. They are gamma-distributed with shape 1 / cv^2.
    """
    mean = 1 / rate
    if cv == 0:
        while True:
            yield mean
    shape = cv**-2
    while True:
        yield rng.gammavariate(shape, mean / shape)


def starts(rate: float, cv: float, until_s: float, rng: random.Random) -> list[float]:
    """Arrivals before `until_s` of a process that has been running before: the run begins anywhere
    within a gap, and in long ones so much more often (length-biased, which makes a gamma of shape k
    one of k + 1), so that as many come in every second as were asked for."""
    found = []
    drawn = gaps(rate, cv, rng)
    at = rng.random() * (1 / rate if cv == 0 else rng.gammavariate(cv**-2 + 1, cv**2 / rate))
    while at < until_s:
        found.append(at)
        at += next(drawn)
    return found


def played(times: list[float], speed: float) -> list[float]:
    """The arrivals of a trace, `speed` times as fast, from its first one on."""
    first = min(times, default=0.0)
    return [(at - first) / speed for at in times]
