"""Ranks of other hosts: who is let in, what reaches them, and what is left when one is lost."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from engine_service.ranks.likeness import likeness
from engine_service.ranks.watcher import Watcher
from tests.left_over import await_nothing_new, held
from tests.service.distant_ranks import (
    config_of,
    distant,
    follower_of,
    gathered,
    start_far,
)
from tests.service.test_ranks_watched import AWAKE_S, ROOT, await_loss, is_gone, leader
from tests.waiting import PATIENCE_S, eventually, free_port, stopwatch
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest


def ready(watcher: Watcher) -> None:
    watcher.await_all(lambda one: one.loaded)


def test_plans_of_any_size_reach_every_rank_in_order(tmp_path: Path) -> None:
    """More than a window of them, and longer ones than a frame and than the ring."""
    rng = random.Random(3)
    plans = [rng.randbytes(rng.choice((0, 10, 5000))) for _ in range(400)]
    plans += [rng.randbytes(5 << 20), b"tell"]
    seen = hashlib.sha256()
    with distant(tmp_path, "counts", "counts") as (watcher, lost, fars):
        ready(watcher)
        for plan in plans:
            seen.update(len(plan).to_bytes(8, "little") + plan)
            watcher.plans.send(plan)
        watcher.await_all(lambda one: one._stage == seen.hexdigest())
        followers = [follower_of(one.pid) for one in fars]
    assert not lost
    assert [one.wait(PATIENCE_S) for one in fars] == [0, 0]  # they left by themselves
    assert all(map(is_gone, followers))


def test_a_rank_that_is_behind_ends_nobody(tmp_path: Path) -> None:
    """Its step takes longer than a silence may, while plans come that its ring has no room for."""
    with distant(tmp_path, "counts", kills=True) as (watcher, lost, fars):
        ready(watcher)
        plans = [b"sleep 4", *[bytes(600 << 10)] * 4, b"tell"]
        for plan in plans:
            watcher.plans.send(plan)
        seen = hashlib.sha256(b"".join(len(one).to_bytes(8, "little") + one for one in plans))
        watcher.await_all(lambda one: one._stage == seen.hexdigest())
        assert not lost
    assert [one.wait(PATIENCE_S) for one in fars] == [0]


def test_a_lost_connection_ends_a_rank_that_is_behind(tmp_path: Path) -> None:
    with distant(tmp_path, "counts", kills=True) as (watcher, lost, fars):
        ready(watcher)
        for plan in (b"sleep 60", *[bytes(600 << 10)] * 4):
            watcher.plans.send(plan)
        time.sleep(0.5)
        followers = [follower_of(one.pid) for one in fars]
        with stopwatch() as awake_s:
            os.kill(watcher.followers[0]._process.pid, signal.SIGKILL)
            assert [one.wait(PATIENCE_S) for one in fars] == [1]
            eventually(lambda: all(map(is_gone, followers)), "a follower is left")
            assert awake_s() < AWAKE_S
        await_loss(watcher)
        assert len(lost) == 1


KILL, STOP, SLOW = signal.SIGKILL, signal.SIGSTOP, pytest.mark.slow


@pytest.mark.parametrize(
    ("whom", "sent"),
    [
        ("follower", KILL),
        ("far", KILL),
        ("near", KILL),
        ("far", STOP),
        pytest.param("follower", STOP, marks=SLOW),
        pytest.param("near", STOP, marks=SLOW),
    ],
)
def test_a_lost_process_of_a_distant_rank_ends_the_group(
    tmp_path: Path, whom: str, sent: signal.Signals
) -> None:
    """Whichever of the three it is; nothing of the group is left on any host."""
    with distant(tmp_path, "", "", kills=True) as (watcher, lost, fars):
        ready(watcher)
        watcher.plans.send(b"a step")
        time.sleep(0.5)
        followers = [follower_of(one.pid) for one in fars]
        nears = [one._process.pid for one in watcher.followers]
        pid = {"follower": followers[1], "far": fars[1].pid, "near": nears[1]}[whom]
        with stopwatch() as awake_s:
            os.kill(pid, sent)
            said = await_loss(watcher)
            ends = [one.wait(PATIENCE_S) for one in fars]
            eventually(lambda: all(map(is_gone, followers)), "a follower is left")
            assert awake_s() < AWAKE_S
        assert said.startswith("rank 2 on ")
        if sent is STOP and whom == "far":  # its follower may be faster, and ends it
            assert "has shown no life for " in said or "connection to its host broke" in said
        elif sent is STOP:
            assert "has shown no life for " in said
            assert "or the network is cut" in said
        elif whom == "follower":
            assert f"its process (pid {pid}) was killed by SIGKILL" in said
        elif whom == "far":
            assert "the connection to its host broke" in said
        assert [error.message for error in lost] == [said]
        assert set(ends) <= {1, -signal.SIGKILL}
    assert all(map(is_gone, nears))


LEADER = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from tests.service.distant_ranks import distant, follower_of\n"
    "from tests.service.test_distant_ranks import ready\n"
    "from engine_service.ranks.watcher import Watcher\n"
    "from tests.service.distant_ranks import config_of, gathered\n"
    "config = config_of(Path(sys.argv[1]), 1, int(sys.argv[2]))\n"
    "hosts = gathered(config, kills=True)\n"
    "watcher = Watcher(1, on_lost=print, start=hosts.start)\n"
    "watcher.open()\n"
    "watcher.tell(1, (1, 1, True, ''))\n"
    "ready(watcher)\n"
    "watcher.plans.send(b'x')\n"
    "time.sleep(0.5)\n"
    "print(watcher.followers[0]._process.pid, flush=True)\n"
    "time.sleep(100)\n"
)


@pytest.mark.parametrize("sent", [KILL, pytest.param(STOP, marks=SLOW)])
def test_a_lost_rank_0_ends_the_ranks_of_other_hosts(tmp_path: Path, sent: signal.Signals) -> None:
    port = free_port()
    far = start_far(config_of(tmp_path, 1, port), 1)
    script = f"import sys\nsys.argv[1:] = [{str(tmp_path)!r}, '{port}']\n" + LEADER
    with leader(script) as (process, (near,)):
        follower = follower_of(far.pid)
        with stopwatch() as awake_s:
            os.kill(process.pid, sent)
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
            assert far.wait(PATIENCE_S) in (1, -signal.SIGKILL)  # by its follower, if it was faster
            eventually(lambda: is_gone(follower) and is_gone(near), "a rank is left")
            assert awake_s() < AWAKE_S


def errors_of(far: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]) -> str:
    assert far.wait(PATIENCE_S) == 1
    return capfd.readouterr().err


def test_a_wrong_token_is_refused_and_the_right_one_still_gets_in(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, 1, port := free_port())
    wrong = start_far(config, 1, secret=b"another token of it".hex())
    strangers = threading.Thread(target=visit, args=(port,))
    strangers.start()
    late: Future[subprocess.Popen[bytes]] = Future()
    done = threading.Event()

    def second() -> None:
        wrong.wait()
        strangers.join()
        late.set_result(start_far(config, 1))
        done.wait()  # it dies with the thread that started it

    threading.Thread(target=second, daemon=True).start()
    hosts = gathered(config)
    said = errors_of(wrong, capfd)
    assert "is not rank 0 of this group: it has another secret; pass the same" in said
    for why in ("it left when it was to prove itself", "it does not speak as a rank"):
        said = f"is no rank of this group: {why}"
        eventually(lambda said=said: said in caplog.text, caplog.text)
    with pytest.raises(ConnectionRefusedError):  # the door is closed
        socket.create_connection(("127.0.0.1", port), 1.0)
    assert hosts._arrived.keys() == {1}
    hosts._arrived[1].link.close()
    assert late.result(PATIENCE_S).wait(PATIENCE_S) == 1
    done.set()


def visit(port: int) -> None:
    """Those who come to any port: one that says nothing, one that speaks HTTP, one that leaves."""
    socks = []
    for words in (b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(60), None):
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), 1.0)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        socks.append(sock)
        if words is None:
            sock.close()
        else:
            sock.sendall(words)
    time.sleep(1.0)
    for sock in socks:
        sock.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"versions": {"tidemill": "0.0.9"}}, "tidemill is '{}' on rank 0 and '0.0.9' on rank 1"),
        ({"config": {"model": "x"}, "digest": "x"}, "model is 'demo' on rank 0 and 'x' on rank 1"),
    ],
)
def test_another_version_or_flag_is_refused_on_both_sides_with_both_values(
    tmp_path: Path, change: dict[str, Any], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, 1, free_port())
    own = likeness(config)
    told = told.format(own["versions"]["tidemill"])
    if "config" in change:
        change = {**change, "config": {**own["config"], **change["config"]}}
    far = start_far(config, 1, likeness={**own, **change})
    with pytest.raises(FailedPrecondition, match="all hosts of a group need the same") as caught:
        gathered(config)
    assert told in caught.value.message
    assert caught.value.reason == "RANKS_DIFFER"
    assert told in errors_of(far, capfd)


def test_ranks_that_came_are_let_go_where_they_cannot_be_started(tmp_path: Path) -> None:
    config = config_of(tmp_path, 1, free_port())
    far = start_far(config, 1)
    hosts = gathered(config)
    assert far.poll() is None
    hosts.close()
    assert far.wait(PATIENCE_S) == 1


def test_what_a_distant_rank_refuses_is_raised_as_it_was(tmp_path: Path) -> None:
    with distant(tmp_path, "refuses") as (watcher, _, fars):
        with pytest.raises(InvalidRequest, match=r"rank 1 on .*: page_size 7 does not") as caught:
            ready(watcher)
        assert caught.value.param == "page_size"
        assert fars[0].wait(PATIENCE_S) == 1


def test_cycles_leave_nothing_behind(tmp_path: Path) -> None:
    before = held()
    for cycle in range(4):
        with distant(tmp_path, "", "") as (watcher, _, fars):
            ready(watcher)
            if cycle % 2:
                fars[0].kill()
                await_loss(watcher)
    await_nothing_new(before)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FailedPrecondition, match=rf"127.0.0.1:{port}: .* pass another port"):
            gathered(config_of(tmp_path, 1, port))


def test_a_node_that_nobody_awaits_is_ended_by_a_signal(tmp_path: Path) -> None:
    config = config_of(tmp_path, 1, port := free_port())
    node = subprocess.Popen(
        [
            sys.executable, "-m", "engine_service", "--device", "cpu", "--node-rank", "1",
            "--tensor-parallel-size", "2", "--nnodes", "2", "--leader-address", f"127.0.0.1:{port}",
            "--group-token-file", str(config.group_token_file),
        ],
        cwd=ROOT,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", port)) as door:
        door.accept()[0].close()  # it is there, and waits
    node.send_signal(signal.SIGTERM)
    assert node.wait(PATIENCE_S) == 1
