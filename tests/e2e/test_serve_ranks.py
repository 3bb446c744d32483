"""`tidemill serve` with several ranks, as a user runs it: what the death of one looks like."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.test_serve import assert_gone, free_ports, serve
from tests.service.test_engine_ranks import BOUND_S, children
from tests.waiting import stopwatch


@pytest.mark.timeout(300)
def test_a_dead_rank_ends_it_with_status_1_and_is_named(tmp_path: Path) -> None:
    with serve(
        tmp_path, "demo", "--device=cpu", "--tensor-parallel-size=2", *free_ports()
    ) as served:
        served.wait_ready()
        everybody = served.descendants()
        (follower,) = children(everybody["engine_service.rank"])
        with stopwatch() as awake_s:
            os.kill(follower, signal.SIGKILL)
            # The bound is promised for the group of ranks, and tested as such where one is lost;
            # how long the command then takes to end the rest, on a busy machine, is not.
            assert_gone({"rank": everybody["engine_service.rank"]})
            assert awake_s() < 3 * BOUND_S
        assert served.wait_end() == 1
        told = rf"ended with status 1: .*rank 1 \(pid {follower}\) was killed by SIGKILL"
        assert re.search(told, served.err), served.err
        assert_gone(everybody | {"follower": follower})
