"""What is reported while ranks load: the tensors of all of them, until the slowest has its own."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from engine_service.ranks.loading import Loading
from tests.service.test_ranks_watched import group, ready
from tests.waiting import eventually
from tidemill.runtime.errors import EngineDead


def test_the_bar_counts_all_ranks_and_ends_with_the_slowest() -> None:
    told: list[tuple[str, int, int]] = []
    with group("loads", "loads") as (watcher, _):
        loading = Loading(lambda *one: told.append(one), watcher)
        loading.tell("checkpoint", 0, 0)
        eventually(lambda: [one.tensors for one in watcher.followers] == [(1, 4)] * 2, "no tensors")
        for done in range(1, 5):
            loading.tell("weights", done, 4)
        assert told == [("checkpoint", 0, 0), *(("weights", 2 + n, 12) for n in range(1, 5))]
        going_on = threading.Thread(target=loading.tell, args=("profile", 0, 0))
        going_on.start()
        for _ in range(3):
            watcher.plans.send(b"read on")
            going_on.join(0.1)
            assert going_on.is_alive(), "two ranks still read"
        watcher.plans.send(b"read on")
        going_on.join(20)
        assert told[-2:] == [("weights", 12, 12), ("profile", 0, 0)]
        assert [one[1] for one in told[1:-1]] == sorted(one[1] for one in told[1:-1])
        ready(watcher)


def test_a_rank_that_is_lost_while_it_reads_ends_the_waiting() -> None:
    with group("loads") as (watcher, _):
        loading = Loading(lambda *one: None, watcher)
        loading.tell("weights", 4, 4)
        eventually(lambda: watcher.followers[0].tensors == (1, 4), "no tensors")
        os.kill(watcher.followers[0]._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"SIGKILL while loading \(weights\)"):
            loading.tell("profile", 0, 0)
