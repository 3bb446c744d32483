"""Twice the load that rows can take, in virtual time: what is served, and how soon.

tests/slow/test_overload.py does the same with processes and clocks.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.unit.test_scheduler import Desk
from tidemill.runtime.errors import Overloaded

ROWS, TOKENS, STEP_S = 16, 64, 0.001
CAPACITY = ROWS / (TOKENS * STEP_S)
"""Requests per second."""
WAIT_S = 0.03
WARM_UP_S = 0.3
"""Nobody knows how long a request stays before the first one has ended."""
SEED = 77
"""The ratio of two tails of a few hundred requests is the test's; chance is not."""


class Run(NamedTuple):
    served: float
    """Share of the capacity that ended in a whole answer."""
    refused: int
    p99_s: float
    """Time to the first token of those who were admitted."""


def run(seed: int, load: float, seconds: float, **limits: float) -> Run:
    """Requests at random moments, `load` times what the rows can take."""
    rng, refused, key = random.Random(seed), 0, 0
    desk = Desk(num_pages=2000, max_rows=ROWS, token_budget=512, queue=1024, **limits)
    begin = desk.now
    next_s = rng.expovariate(load * CAPACITY)
    while (desk.now - begin) / 1e9 < seconds:
        while next_s <= (desk.now - begin) / 1e9:
            key += 1
            next_s += rng.expovariate(load * CAPACITY)
            try:
                desk.submit(key, 8, TOKENS)
            except Overloaded:
                refused += 1
        desk.step()
    whole = [one for one in desk.finishes.values() if one.usage.output_tokens == TOKENS]
    settled = [one.timings for one in whole if one.timings.arrival_ns - begin > WARM_UP_S * 1e9]
    firsts = sorted((one.queue_ns + one.prefill_ns) / 1e9 for one in settled)
    served = len(whole) / (seconds * CAPACITY)
    return Run(served, refused, firsts[int(len(firsts) * 0.99)])


def test_at_twice_the_load_the_engine_stays_busy_and_waits_stay_short() -> None:
    calm = run(SEED, 0.8, 4.0, max_queue_delay_s=WAIT_S)
    busy = run(SEED, 2.0, 1.5, max_queue_delay_s=WAIT_S)
    assert calm.refused < 0.05 * 0.8 * CAPACITY * 4.0
    assert busy.served >= 0.9
    assert busy.p99_s <= 3 * calm.p99_s
    assert busy.p99_s <= 2 * WAIT_S


def test_control_a_bound_by_number_alone_lets_everybody_wait() -> None:
    busy = run(SEED, 2.0, 1.5)
    assert busy.p99_s > 10 * WAIT_S
