"""Ranks as actors of a Ray cluster: they answer as one rank does, and end as others do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine_service.config import EngineConfig
from engine_service.ranks import on_ray
from engine_service.ranks.gathering import Gathering
from engine_service.ranks.on_ray import RayHosts, _own_gpu, device_of
from tests.equivalence.test_rank_group import ROOT, TIMEOUT_S, answers
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest, Unavailable

ray = pytest.importorskip("ray")
PROGRAM = """
import json, os, signal, sys, threading, time
from pathlib import Path
import ray
from engine_service.ranks import silence
from tests.equivalence import mixed_requests
from tests.service.distant_ranks import follower_of, said_of
from tests.waiting import eventually
from tidemill import LLM, SamplingParams
from tidemill.runtime.errors import ServiceError

def actors():
    lines = {int(p.parent.name): said_of(p) for p in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, line in lines.items() if line.startswith(b"ray::RankActor")]

def open_llm(size):
    return LLM("demo", device="cpu", max_rows=4, executor="ray", tensor_parallel_size=size,
               log_level="warning")

def kill(pid):
    global began
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)

silence.SERVING_S = 60.0  # a busy machine starves ranks for seconds; no rank is stopped here
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
# Printed once Ray, whose threads print as well, has ended: lines may mix.
told = [json.dumps(mixed_requests.found("demo", 2, executor="ray"))]

llm = open_llm(2)
eventually(lambda: len(actors()) == 1, "the first group's actor does not end")
(actor,) = actors()
follower = follower_of(actor)
threading.Timer(0.5, kill, [actor]).start()
try:
    llm.generate("The king", SamplingParams(max_tokens=1900, ignore_eos=True), False)
except ServiceError as error:
    assert time.monotonic() - began < 30.0, time.monotonic() - began
    told.append(f"{type(error).__name__} {error}")
llm.close()
while Path(f"/proc/{follower}").exists():
    assert time.monotonic() - began < 30.0  # `slow/test_ray_cluster.py` holds it to five
    time.sleep(0.02)

try:
    open_llm(4)
except ServiceError as error:
    told.append(f"{type(error).__name__} {error}")
assert ray.is_initialized()  # it is the program's
eventually(lambda: not actors(), "an actor is left")
ray.shutdown()
print("", *told, "ended", sep=chr(10))
"""


def printed(script: str) -> list[str]:
    """By a program, of which nothing may be left: a cluster that it starts ends with it."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line and "(raylet)" not in line]


@pytest.mark.timeout(900)
def test_actors_answer_as_one_rank_and_end_as_others_do() -> None:
    """The control is that of ranks on other hosts: a follower is the same process everywhere."""
    said = printed(PROGRAM)
    assert json.loads(said[0]) == answers("demo", 1)
    assert said[1].startswith("EngineDead rank 1 on ")
    assert "the connection to its host broke" in said[1]
    assert said[2] == (
        "InvalidRequest 4 ranks need a CPU each, and the Ray cluster has 3; pass fewer ranks "
        "(--tensor-parallel-size), or add hosts to the cluster"
    )
    assert said[3:] == ["ended"]  # no actor is left


def test_rank_0_has_the_gpu_that_ray_gave_it() -> None:
    assert device_of("3", None) == 3
    assert device_of("3", "2,3") == 1
    assert device_of("GPU-b", "GPU-a,GPU-b") == 1
    with pytest.raises(FailedPrecondition, match="GPU 0, which CUDA_VISIBLE_DEVICES=4,5 hides"):
        device_of("0", "4,5")
    with pytest.raises(InvalidRequest, match="Ray chooses them"):
        RayHosts(EngineConfig(device="cuda:1"), 2, ends_silent_leader=True)


def test_a_cluster_that_starts_no_actor_leaves_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    doors: list[Gathering] = []

    def door(*args: Any) -> Gathering:
        doors.append(Gathering(*args))
        return doors[0]

    def no_actor(*_: Any) -> Any:
        socket.create_connection(("127.0.0.1", doors[0].port), 10.0).close()
        raise RuntimeError("the cluster is gone")

    monkeypatch.setattr(on_ray, "Gathering", door)
    hosts = RayHosts(EngineConfig(device="cpu"), 2, ends_silent_leader=True)
    hosts._address = "127.0.0.1"
    monkeypatch.setattr(hosts, "_actor", no_actor)
    with pytest.raises(RuntimeError, match="the cluster is gone"):
        hosts._start_actors(ray, lambda *_: None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", doors[0].port), 10.0)


def test_without_ray_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['ray'] = None\n"
        "from tidemill import LLM\n"
        "from tidemill.runtime.errors import FailedPrecondition\n"
        "try:\n"
        "    LLM('demo', device='cpu', executor='ray', tensor_parallel_size=2)\n"
        "except FailedPrecondition as error:\n"
        "    print(error)\n"
    )
    assert "pip install 'tidemill[ray]'" in printed(script)[-1]


@pytest.mark.parametrize("words", ["", "Task\nthe worker died"])
def test_an_actor_that_never_tells_its_gpu_is_not_waited_for_for_ever(words: str) -> None:
    waited: list[float] = []

    def get(_: Any, timeout: float) -> Any:
        waited.append(timeout)
        raise ray.exceptions.GetTimeoutError(words)

    actor = SimpleNamespace(gpu_ids=SimpleNamespace(remote=object))
    broken = SimpleNamespace(get=get, exceptions=ray.exceptions)
    why = words.splitlines()[-1] if words else "GetTimeoutError"
    with pytest.raises(Unavailable, match=f"within 300 s or failed: {why}; ray status"):
        _own_gpu(broken, actor)
    assert waited == [300.0]
