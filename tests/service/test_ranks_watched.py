"""Rank 0's watcher with real processes that compute nothing: how they end, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_service.config import EngineConfig
from engine_service.pipe import BlockingPipe, Unframer, pair
from engine_service.place import Place
from engine_service.ranks import silence
from engine_service.ranks.messages import Start
from engine_service.ranks.watcher import Watcher
from tests.left_over import await_nothing_new, held
from tests.service.late_follower import IMPORTED_S
from tests.waiting import PATIENCE_S, eventually, stopwatch
from tidemill.runtime.errors import EngineDead, InvalidRequest, NotFound, ServiceError

FOLLOWER = "tests.service.idle_follower"
BOUND_S = 5.0
AWAKE_S = BOUND_S + 1.0
"""On a stopwatch, which does not stand still in quite the same moments as the ranks."""
ROOT = Path(__file__).parents[2]


@contextmanager
def group(*behaviours: str, kills: bool = False) -> Iterator[tuple[Watcher, list[ServiceError]]]:
    """A watcher with a follower for every behaviour, and what it says of their loss."""
    lost: list[ServiceError] = []
    watcher = Watcher(len(behaviours), on_lost=lost.append, module=FOLLOWER)
    watcher.open()
    try:
        for rank, behaviour in enumerate(behaviours, 1):
            watcher.tell(rank, (rank, len(behaviours), kills, behaviour))
        yield watcher, lost
    finally:
        watcher.close()


def ready(watcher: Watcher) -> list[int]:
    """Waits for all followers; returns their process ids."""
    watcher.await_all(lambda one: one.loaded)
    return [one._process.pid for one in watcher.followers]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def await_loss(watcher: Watcher) -> str:
    """Plans go out until the loss is raised; returns what it says."""
    with stopwatch() as awake_s, pytest.raises(EngineDead) as caught:  # noqa: PT012
        while awake_s() < AWAKE_S:
            watcher.check()
            watcher.plans.send(bytes(1000))
            time.sleep(0.005)
    assert awake_s() < AWAKE_S
    return caught.value.message


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_killed_follower_ends_the_group_and_is_named(rank: int) -> None:
    with group("", "", "") as (watcher, lost):
        pids = ready(watcher)
        os.kill(pids[rank - 1], signal.SIGKILL)
        said = await_loss(watcher)
        assert f"rank {rank} (pid {pids[rank - 1]}) was killed by SIGKILL" in said
        assert "the group of 4 ranks" in said
        eventually(lambda: lost, "nobody was told")  # behind the one that waits
        assert [error.message for error in lost] == [said]
    assert all(map(is_gone, pids))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_stopped_follower_ends_the_group_and_is_named(rank: int) -> None:
    """While the ring is small beside what is sent: the writer waits for a reader that sleeps."""
    with group("", "") as (watcher, lost):
        pids = ready(watcher)
        began = time.monotonic()
        os.kill(pids[rank - 1], signal.SIGSTOP)
        said = rf"rank {rank} \(pid \d+\) has shown no life for "
        with stopwatch() as awake_s, pytest.raises(EngineDead, match=said):  # noqa: PT012
            while awake_s() < AWAKE_S:
                watcher.plans.send(bytes(1 << 20))
        assert awake_s() < AWAKE_S
        assert time.monotonic() - began > 2.0
        eventually(lambda: lost, "nobody was told")
        assert len(lost) == 1
    assert all(map(is_gone, pids))


def test_nobody_is_accused_while_all_are_stopped_together() -> None:
    """The control, and what a paused machine looks like: silence is counted in ticks of one's own.

    Rank 0 runs in a process of its own here, and is stopped with its followers.
    """
    script = (
        "import sys, time\n"
        "from tests.service.test_ranks_watched import group, ready\n"
        "with group('', '', kills=True) as (watcher, lost):\n"
        "    pids = ready(watcher)\n"
        "    watcher.plans.send(b'x')\n"
        "    print(*pids, flush=True)\n"
        "    sys.stdin.readline()\n"
        "    watcher.check()\n"
        "    print('alive', len(lost), flush=True)\n"
    )
    with leader(script) as (process, pids):
        everybody = [process.pid, *pids]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.5)
        for pid in reversed(everybody):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.6)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout is not None
        assert process.stdout.readline() == "alive 0\n"
        assert process.wait(PATIENCE_S) == 0
    eventually(lambda: all(map(is_gone, pids)), "followers outlive rank 0")


@contextmanager
def leader(script: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Rank 0 in a process of its own, and the ids of its followers, which it prints first."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        try:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert pids, "rank 0 did not start"
            yield process, pids
        finally:
            process.kill()


ASLEEP = (
    "import time\n"
    "from tests.service.test_ranks_watched import group, ready\n"
    "with group('', '', kills={kills}) as (watcher, lost):\n"
    "    pids = ready(watcher)\n"
    "    watcher.plans.send(b'x')\n"
    "    print(*pids, flush=True)\n"
    "    time.sleep(100)\n"
)


def test_followers_end_at_once_with_a_killed_rank_0() -> None:
    with leader(ASLEEP.format(kills=True)) as (process, pids), stopwatch() as awake_s:
        process.kill()
        eventually(lambda: all(map(is_gone, pids)), "followers outlive rank 0")
        assert awake_s() < AWAKE_S


def test_a_stopped_rank_0_is_ended_by_its_followers() -> None:
    with leader(ASLEEP.format(kills=True)) as (process, pids):
        began = time.monotonic()
        with stopwatch() as awake_s:
            os.kill(process.pid, signal.SIGSTOP)
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
            assert time.monotonic() - began > 2.0
            assert awake_s() < AWAKE_S
        eventually(lambda: all(map(is_gone, pids)), "followers outlive rank 0")


@pytest.mark.parametrize("is_told", [True, False])
def test_who_says_so_may_hold_the_interpreter_for_long(is_told: bool) -> None:
    """As the end of a profile does; no thread of rank 0 shows life meanwhile."""
    around = "watcher.plans.away(60.0)" if is_told else "nullcontext()"
    script = (
        "import ctypes\n"
        "from contextlib import nullcontext\n"
        "from tests.service.test_ranks_watched import group, ready\n"
        "with group('', '', kills=True) as (watcher, lost):\n"
        "    pids = ready(watcher)\n"
        "    watcher.plans.send(b'x')\n"
        "    print(*pids, flush=True)\n"
        f"    with {around}:\n"
        "        ctypes.PyDLL(None).sleep(5)\n"
        "    watcher.check()\n"
        "    print('alive', len(lost), flush=True)\n"
    )
    with leader(script) as (process, pids):
        assert process.wait(PATIENCE_S) == (0 if is_told else -signal.SIGKILL)
        assert process.stdout is not None
        assert process.stdout.read() == ("alive 0\n" if is_told else "")
    eventually(lambda: all(map(is_gone, pids)), "followers outlive rank 0")


def test_a_users_program_may_stand_in_a_debugger() -> None:
    with leader(ASLEEP.format(kills=False)) as (process, pids):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4.5)
        assert process.poll() is None
        assert not any(map(is_gone, pids))


def test_what_a_follower_says_of_its_end_is_raised_as_it_was() -> None:
    with group("", "refuses") as (watcher, _):
        with pytest.raises(InvalidRequest, match=r"rank 2 \(pid \d+\): page_size 7") as caught:
            ready(watcher)
        assert (caught.value.param, caught.value.reason) == ("page_size", "INVALID_ARGUMENT")


def test_a_rank_that_still_imports_shows_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries may come from a network's storage, for longer than silence may last."""
    monkeypatch.setattr(silence, "LOADING_S", IMPORTED_S / 2)
    lost: list[ServiceError] = []
    watcher = Watcher(1, on_lost=lost.append, module="tests.service.late_follower")
    watcher.open()
    began = time.monotonic()
    try:
        watcher.tell(1, Start(EngineConfig(), Place(1, 2), ends_silent_leader=True))
        with pytest.raises(NotFound, match="nothing to load"):
            ready(watcher)
        assert time.monotonic() - began > IMPORTED_S
    finally:
        watcher.close()


def test_a_silent_end_while_loading_names_the_stage() -> None:
    with (
        group("exits while it loads", "") as (watcher, _),
        pytest.raises(EngineDead, match=r"rank 1 .* ended with status 7 while loading \(weights\)"),
    ):
        ready(watcher)


def test_the_cause_is_told_and_not_what_it_did_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers hear of a death through their connections, often before the process is gone."""
    monkeypatch.setattr("engine_service.ranks.watcher._SETTLING_S", 30.0)  # seen last
    with group("mourns", "mourns", "crashes") as (watcher, _):
        pids = ready(watcher)
        watcher.plans.send(b"crash")
        with pytest.raises(EngineDead, match=rf"rank 3 \(pid {pids[2]}\) was killed by SIGSEGV"):
            watcher.await_all(lambda one: False)


def test_rank_0_learns_what_is_behind_its_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    explained_s = "engine_service.ranks.watcher._EXPLAINED_S"
    monkeypatch.setattr(explained_s, 60.0)
    with group("", "") as (watcher, _):
        pids = ready(watcher)
        own = RuntimeError("connection closed by peer")
        os.kill(pids[0], signal.SIGKILL)
        assert "rank 1" in str(watcher.explain(own))
        mine = InvalidRequest("mine")
        assert watcher.explain(mine) is not own
    monkeypatch.setattr(explained_s, 0.3)
    with group("") as (watcher, _):
        ready(watcher)
        assert watcher.explain(own) is own  # nobody else is hurt


def test_a_thread_that_ends_takes_nobody_along() -> None:
    """The kernel ends children with the thread that started them; a user's thread may be short."""
    made: list[Watcher] = []

    def make() -> None:
        watcher = Watcher(1, on_lost=lambda error: None, module=FOLLOWER)
        watcher.open()
        watcher.tell(1, (1, 1, False, ""))
        made.append(watcher)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    ready(made[0])
    time.sleep(0.5)
    made[0].check()
    made[0].close()


def test_twenty_cycles_leave_nothing_behind() -> None:
    before, pids = held(), set[int]()
    for cycle in range(20):
        with group("", "") as (watcher, lost):
            pids.update(ready(watcher))
            if cycle % 2:
                watcher.plans.send(b"a step")
            else:
                os.kill(watcher.followers[0]._process.pid, signal.SIGKILL)
                await_loss(watcher)
        assert bool(lost) != bool(cycle % 2)
    await_nothing_new(before)
    assert len(pids) == 40
    assert all(map(is_gone, pids))


def test_a_closed_group_says_so() -> None:
    with group("") as (watcher, lost):
        ready(watcher)
        codes = watcher.followers
    with pytest.raises(EngineDead, match="the engine has been closed"):
        watcher.check()
    assert not lost
    assert [one.code for one in codes] == [0]  # it left by itself


def test_the_pipe_says_its_last_words_whatever_the_other_thread_does() -> None:
    ours, theirs = pair()
    pipe = BlockingPipe(ours)
    heard: list[object] = []

    def listen() -> None:
        heard.extend(Unframer().feed(theirs.recv(1 << 16)))
        theirs.close()

    listener = threading.Thread(target=listen)
    listener.start()
    assert pipe.last_words(["rank 1 is lost"], 5.0)
    listener.join()
    assert heard == ["rank 1 is lost"]
    pipe.close()


def test_last_words_do_not_break_into_a_frame_and_do_not_wait_for_ever() -> None:
    ours, theirs = pair()
    pipe = BlockingPipe(ours)
    stuck = threading.Thread(target=pipe.send, args=([bytes(64 << 20)],))  # nobody reads it
    stuck.start()
    eventually(pipe._sending.locked, "nothing is sent")
    began = time.monotonic()
    assert not pipe.last_words(["rank 1 is lost"], 0.3)
    assert time.monotonic() - began < 20.0
    unframer, found = Unframer(), list[bytes]()
    while not found:
        found = unframer.feed(theirs.recv(1 << 20))
    stuck.join()
    assert found == [bytes(64 << 20)]
    pipe.close()
    theirs.close()
