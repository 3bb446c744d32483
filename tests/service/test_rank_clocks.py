"""What ranks say of their steps, in rank 0's time, wherever their hosts' clocks count from."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest

from engine_service.core.messages import RankTrace
from engine_service.ranks.clocks import OtherClock
from engine_service.ranks.processes import FollowerProcess
from engine_service.ranks.watcher import Watcher
from tests.service.test_ranks_watched import FOLLOWER
from tests.waiting import eventually

APART_NS, SLACK_NS = 5_000_000_000_000, 2_000_000_000


@pytest.mark.parametrize(
    ("host", "apart_ns", "is_right"),
    [
        ("", 0, True),
        ("another", APART_NS, True),
        ("another", -APART_NS, True),
        ("", APART_NS, False),  # the control: taken for this host's
    ],
)
def test_times_of_another_host(host: str, apart_ns: int, is_right: bool) -> None:
    start = partial(FollowerProcess, host=host)
    watcher = Watcher(1, on_lost=lambda error: None, module=FOLLOWER, start=start)
    watcher.open()
    try:
        watcher.tell(1, (1, 1, False, f"is timed {apart_ns}"))
        watcher.await_all(lambda one: one.loaded)
        began, told = time.monotonic_ns(), list[RankTrace]()
        for seq in range(5):
            watcher.plans.send(str(seq).encode())
        eventually(lambda: len(told.extend(watcher.take_times()) or told) == 5, "no times")
        assert [one.seq for one in told] == [0, 1, 2, 3, 4]
        assert {one.done_ns - one.launched_ns for one in told} == {1000}
        ended = time.monotonic_ns()
        inside = [began - SLACK_NS < one.done_ns < ended + SLACK_NS for one in told]
        assert all(inside) if is_right else not any(inside)
    finally:
        watcher.close()


def test_the_quickest_of_recent_messages_counts(seed: int) -> None:
    """Ways of 0.1 to 20 ms, and clocks that drift by 0.1 ms a second for an hour."""
    rng, clock = random.Random(seed), OtherClock()
    for second in range(3600):
        apart = APART_NS + second * 100_000
        told = second * 1_000_000_000
        clock.heard(told, told + apart + rng.randint(100_000, 20_000_000))
    assert abs(clock.behind_ns - apart) < 8_000_000
    assert OtherClock().behind_ns == 0
