"""Several ranks as rank 0's loop sees them, without a model: what goes wrong between two steps."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from engine_service import distributed, parts, peers, rank_worker
from engine_service.composition import compose
from engine_service.config import EngineConfig
from engine_service.core.step import StepPlan
from engine_service.distributed import Group, open_store
from engine_service.peers import PeerSums
from engine_service.pipe import pack
from engine_service.place import FIRST, Place
from engine_service.rank_worker import open_worker
from engine_service.ranks import following
from engine_service.ranks import group as ranks_group
from engine_service.ranks.broadcast import Ended
from engine_service.ranks.group import RankGroup, open_group
from engine_service.ranks.hosts import ThisHost
from engine_service.ranks.messages import Start
from tests.service.test_ranks_watched import group, ready
from tests.waiting import PATIENCE_S, eventually, stopwatch
from tidemill.runtime.errors import EngineDead, FailedPrecondition, InvalidRequest, Unsupported

CUDA = torch.device("cuda", 0)
CONFIG = EngineConfig(model="demo", device="cpu", tensor_parallel_size=2)


def plan(seq: int, **fields: Any) -> StepPlan:
    return StepPlan(seq=seq, new_rows=(), page_appends=(), own_spans=(), **fields)


class Own:
    """Rank 0's worker."""

    limits = None
    depth = 1

    def launch(self, plan: Any) -> Any:
        return plan

    def close(self) -> None:
        pass


def test_a_plan_that_was_told_and_not_run_ends_the_group() -> None:
    """A user's Ctrl-C while rank 0 tells a plan: followers have it, rank 0 goes on without."""
    with group("") as (watcher, _):
        ready(watcher)
        executor = RankGroup(Own(), watcher, ThisHost(CONFIG, 2))  # type: ignore[arg-type]
        executor.close.detach()
        assert executor.launch(plan(1)).seq == 1
        real = watcher.plans.send

        def interrupted(message: bytes) -> None:
            real(message)
            raise KeyboardInterrupt

        watcher.plans.send = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            executor.launch(plan(2))
        watcher.plans.send = real  # type: ignore[method-assign]
        with pytest.raises(EngineDead, match="rank 0 failed: KeyboardInterrupt"):
            executor.launch(plan(3))


def test_what_is_collected_behind_a_loss_is_nobodys() -> None:
    """A device that waits for a lost rank is made to go on, and hands over what lay there."""
    with group("") as (watcher, lost):
        (pid,) = ready(watcher)

        class Awaits(Own):
            def collect(self, handle: Any) -> Any:
                os.kill(pid, signal.SIGKILL)
                eventually(lambda: lost, "nobody notices")
                return "whatever lay there"

        executor = RankGroup(Awaits(), watcher, ThisHost(CONFIG, 2))  # type: ignore[arg-type]
        executor.close.detach()
        with pytest.raises(EngineDead, match="was killed by SIGKILL"):
            executor.collect(executor.launch(plan(1)))


LEFT = ["own", "followers", "aborted True", "destroyed"]
LOST = ["aborted False", "followers", "own", "aborted True", "destroyed"]


def closing(
    monkeypatch: pytest.MonkeyPatch, own: Callable[[], None] = lambda: None, **watched: bool
) -> list[str]:
    """What is done, in order, at the end of a group on a device."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(ranks_group, "release_all", lambda: None)
    monkeypatch.setattr(ranks_group, "abort_all", lambda *, waits: done.append(f"aborted {waits}"))
    watcher: Any = SimpleNamespace(**watched, close=lambda: done.append("followers"))
    hosts: Any = SimpleNamespace(close=lambda: None)
    worker: Any = SimpleNamespace(close=lambda: (done.append("own"), own()))
    ranks_group._close(watcher, hosts, worker)
    return done


@pytest.mark.parametrize("has_given_up", [True, False])
def test_nothing_waits_for_ranks_that_were_killed_within_a_step(
    has_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device: its graphs are taken down behind its last step."""
    done = closing(monkeypatch, is_lost=False, has_given_up=has_given_up)
    assert done == (["aborted False", *LEFT] if has_given_up else LEFT)


def test_a_group_that_is_lost_is_left_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its graphs end before the interpreter does: until then nothing comes back from aborting."""
    assert closing(monkeypatch, is_lost=True, has_given_up=False) == LOST
    assert not caplog.records


def test_a_device_that_answers_no_more_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks_group, "_LEAVING_S", 0.05)
    never = threading.Event()
    try:
        done = closing(monkeypatch, never.wait, is_lost=True, has_given_up=False)
        assert done == LOST[:3]
        assert "the device does not answer" in caplog.text
    finally:
        never.set()
        for thread in threading.enumerate():
            if thread.name == "leave":
                thread.join()


def test_a_device_that_fails_behind_a_loss_is_told_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("an illegal memory access")

    assert closing(monkeypatch, fails, is_lost=True, has_given_up=False) == LOST[:3]
    assert "RuntimeError: an illegal memory access" in caplog.text


@pytest.fixture
def foreign_group() -> Iterator[None]:
    """torch.distributed is in use in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("foreign_group")
def test_a_second_group_in_a_process_is_refused_and_leaves_the_first_alone() -> None:
    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("it has begun to load")

    with pytest.raises(FailedPrecondition, match="another process") as refused:
        open_group(
            CONFIG,
            2,
            lambda *stage: None,
            open_worker=never,
            hosts=ThisHost(CONFIG, 2),
            module="tests.service.idle_follower",
        )
    assert refused.value.reason == "RANKS_TAKEN"
    assert dist.is_initialized()


@pytest.mark.parametrize(
    ("own", "others", "used"),
    [(None, [None], True), (None, ["no access"], False), ("no access", [None], False)],
)
def test_all_ranks_add_up_through_peers_or_none_does(
    own: str | None, others: list[str | None], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Peers:
        def __init__(self, *args: Any, **sizes: Any) -> None:
            if own is not None:
                raise RuntimeError(own)

    monkeypatch.setattr(distributed, "PeerSums", Peers)
    monkeypatch.setattr(Group, "all_of", lambda self, fact: [fact, *others])
    made = Group(0, 2).with_peers(8, 64, torch.bfloat16, CUDA)
    assert (made.peers is not None) == used


def test_hosts_of_different_sizes_agree_that_there_are_no_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of hosts with 2, 1 and 1 ranks the first could have some; whatever ranks ask each other, all
    of them ask."""
    asked: list[Any] = []

    def all_of(self: Group, fact: Any) -> list[Any]:
        asked.append(fact)
        return [True, True, False, False]

    monkeypatch.setattr(Group, "all_of", all_of)
    for is_one_host in (True, True, False, False):
        group = Group(0, 2, is_one_host=is_one_host)
        assert group.with_peers(8, 64, torch.bfloat16, CUDA).peers is None
    assert asked == [True, True, False, False]


def test_an_engine_that_is_refused_behind_loading_keeps_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the error that a user's program keeps would keep the followers too. What can be known
    before is refused before any is started."""
    opened: list[str] = []
    closed: list[str] = []

    class Opened:
        rank_times = None
        away = None

        def __init__(self, config: EngineConfig, size: int, report: Any, **options: Any) -> None:
            opened.append("the group")
            self.own = open_worker(config, report, place=FIRST)

        def close(self) -> None:
            closed.append("the group")

    monkeypatch.setattr(parts, "open_group", Opened)
    config = replace(CONFIG, default_method="sideways")
    with pytest.raises(InvalidRequest, match="default_method 'sideways'"):
        compose(config, lambda *stage: None)
    assert not opened

    def refuse(*_: object) -> None:
        raise InvalidRequest("found out late")

    monkeypatch.setattr(parts, "_facts", refuse)
    with pytest.raises(InvalidRequest, match="found out late"):
        compose(CONFIG, lambda *stage: None)
    assert opened == closed == ["the group"]


def test_nobody_adds_by_a_kernel_where_kernels_have_been_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums = PeerSums.__new__(PeerSums)
    residual = torch.zeros(3, 64)
    sums._rows, sums._width, sums._dtype, sums._rank = 8, 64, torch.float32, 0
    monkeypatch.setattr(peers, "runs_triton", lambda x: True)
    assert sums.fit(residual)
    assert not sums.fit(torch.zeros(9, 64))
    monkeypatch.setattr(peers, "runs_triton", lambda x: False)
    assert not sums.fit(residual)


def test_a_stage_on_the_cpu_times_its_steps_without_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the machine has one, and steps of stages overlap."""

    class Stage(Own):
        def facts(self) -> dict[str, Any]:
            return {"device": "cpu"}

        def collect(self, handle: Any) -> None:
            pass

    class Plans:
        def __init__(self) -> None:
            self._left = [pack(plan(1, is_timed=True))]

        def receive(self, timeout_s: float | None = None) -> bytes:
            if not self._left:
                raise Ended("no more")
            return self._left.pop()

    class Pipe:
        said: ClassVar[list[Any]] = []

        def send(self, batch: list[Any]) -> None:
            self.said.extend(batch)

    def no_device(*args: Any, **named: Any) -> Any:
        raise AssertionError("a device was used")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", no_device)
    with pytest.raises(Ended):
        following._run(Stage(), Plans(), Pipe())  # type: ignore[arg-type]
    assert [told.seq for told in Pipe.said] == [1]


@pytest.mark.parametrize("local_size", [1, 2])
def test_what_ends_a_rank_is_told_on_its_own_host_too(
    local_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it is another one than rank 0's: else the log there blames rank 0's host."""
    said: list[Any] = []

    def refused(*args: Any, **options: Any) -> Any:
        raise InvalidRequest("rank-00001-of-00002.safetensors is missing")

    start = Start(CONFIG, Place(1, 2, local_size=local_size), ends_silent_leader=True)
    pipe: Any = SimpleNamespace(send=said.extend)
    plans: Any = SimpleNamespace()
    assert following.follow(pipe, start, plans, refused) == 1
    assert [told.error.message for told in said] == ["rank-00001-of-00002.safetensors is missing"]
    assert ("rank-00001-of-00002" in caplog.text) == (local_size == 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", ""])
def test_the_ranks_store_listens_where_it_is_told_to(address: str) -> None:
    """As on a host that others reach at one of its addresses only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with stopwatch() as awake_s:
        server, store, port = open_store(socket.create_server((address, 0), family=family))
        assert awake_s() < 10.0
    host = address or "127.0.0.1"
    other = dist.TCPStore(host, port, wait_for_workers=False)
    other.set("rank", "1")
    assert store.get("rank") == b"1"
    with ThreadPoolExecutor(1) as waiting:
        never = waiting.submit(store.get, "another rank")
        time.sleep(0.2)
        assert not never.done()
        del server
        with pytest.raises(dist.DistError):
            never.result(PATIENCE_S)


@pytest.mark.parametrize(("size", "stages"), [(0, 1), (-1, 1), (65, 1), (100, 1), (16, 5)])
def test_a_number_of_ranks_that_no_group_has_is_refused(size: int, stages: int) -> None:
    config = replace(CONFIG, tensor_parallel_size=size, pipeline_parallel_size=stages)
    with pytest.raises(InvalidRequest, match="1 to 64 ranks") as refused:
        compose(config, lambda *stage: None)
    assert f"tensor_parallel_size is {size}" in refused.value.message


def test_a_simulation_has_no_other_hosts() -> None:
    """Also where a program asks for it, which no command line has checked."""
    config = EngineConfig(model="demo", device="cpu", executor="simulated")
    several: dict[str, Any] = {"nnodes": 2, "leader_address": "a", "group_token_file": "t"}
    for field, value in several.items():
        with pytest.raises(InvalidRequest, match=f"{field}.* executor simulated") as refused:
            compose(replace(config, **{field: value}), lambda *stage: None)
        assert refused.value.param == field


def test_a_rank_that_others_started_moves_no_pages() -> None:
    """It has some of the model, and nobody to ask for the rest."""
    config = replace(CONFIG, role="decode")
    with pytest.raises(Unsupported, match="role is 'decode', and only rank 0") as refused:
        compose(config, lambda *stage: None, Place(0, 2))
    assert refused.value.param == "role"


@pytest.mark.parametrize(("told", "wanted"), [("3", 3), ("4,2", 4), ("", 1), (None, 1)])
def test_threads_are_those_of_the_environment_or_a_share(
    told: str | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert rank_worker._num_threads(1 << 20) == wanted
