"""Mixed traffic for five minutes: every answer is right and nothing grows."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from frontend.template_pool import MAX_WORKERS
from tests.e2e.real_stack import HOST, SLACK_HANDLES, Stack, connected, until_idle
from tests.e2e.test_serve import serve
from tests.slow.traffic import Ask, Choices, Traffic
from tests.waiting import PATIENCE_S, eventually, free_port

SOAK_S = float(os.environ.get("SOAK_SECONDS", "300"))
"""Of both models together; less is for work on the test itself."""
WARM_UP_S = 20.0
GROWTH = 1.15
SLACK_THREADS = 2  # gRPC adds pollers under load and ends them when it likes
PER_CHILD = 3
"""Handles. A frontend starts another process for templates, of which it has four at most, where one
stands still, as it may on a busy machine."""
HELPERS = 2
"""Of Python's multiprocessing: it forks them, and tracks what they share."""
FEW = (
    "--max-rows=16",
    "--num-pages=80",
    "--max-model-len=1280",
    "--drain-timeout-s=1",
    "--max-queue-delay-s=0",
)
"""Pages for one of the longest requests: rows are preempted all the time."""


class Held(NamedTuple):
    """What a process holds. `tasks`: of its event loop; a rank has none."""

    handles: int
    """But those that come with its children."""
    threads: int
    rss: int
    tasks: int


def tasks_of(url: str) -> int:
    """As the service's metrics tell it."""
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    found = re.search(r"^tidemill_event_loop_tasks (\S+)", metrics, re.MULTILINE)
    assert found is not None, metrics
    return int(float(found[1]))


def held(stack: Stack, metrics: dict[str, str]) -> dict[str, Held]:
    """Of each process; `metrics` are the addresses of those that tell theirs."""
    found = {}
    for name, pid in stack.services.items():
        tasks = tasks_of(metrics[name]) if name in metrics else 0
        process = psutil.Process(pid)
        rss, children = process.memory_info().rss, process.children(recursive=True)
        assert len(children) <= MAX_WORKERS + HELPERS, children
        handles = process.num_fds() - PER_CHILD * len(children)
        found[name] = Held(handles, process.num_threads(), rss, tasks)
    return found


def grown(before: dict[str, Held], after: dict[str, Held]) -> dict[str, tuple[Held, Held]]:
    """Processes that hold more than before."""
    limits = {
        name: Held(
            then.handles + SLACK_HANDLES,
            then.threads + SLACK_THREADS,
            int(then.rss * GROWTH),
            then.tasks,
        )
        for name, then in before.items()
    }
    return {
        name: (before[name], now)
        for name, now in after.items()
        if any(value > limit for value, limit in zip(now, limits[name], strict=True))
    }


async def drive(stack: Stack, rng: random.Random, seconds: float) -> tuple[Traffic, int]:
    """Connections of its own, closed at the end; the server is idle before and after."""
    async with connected(stack) as faces:
        traffic = Traffic(faces, rng)
        await traffic.learn()
        await until_idle(faces)
        await traffic.run(seconds)
        await until_idle(faces)
        metrics = (await faces.http.get("/metrics")).text
    preemptions = re.search(r"^tidemill_num_preemptions_total\S* (\S+)", metrics, re.MULTILINE)
    return traffic, int(float(preemptions[1])) if preemptions else 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("model", "share"), [("demo", 0.7), ("demo-block", 0.3)])
async def test_soak(tmp_path: Path, seed: int, model: str, share: float) -> None:
    stack = Stack(free_port(), free_port(), free_port())
    ports = (f"--http-port={stack.http_port}", f"--grpc-port={stack.grpc_port}")
    rng, metrics_port = random.Random(seed), free_port()
    metrics = {"engine_service": f"http://{HOST}:{metrics_port}", "frontend": stack.url}
    ports += (f"--engine-port={stack.port}", f"--metrics-port={metrics_port}")
    with serve(tmp_path, model, *ports, *FEW) as served:
        served.wait_ready()
        stack.services |= served.children()
        assert len(stack.services) == 3
        assert metrics.keys() < stack.services.keys()
        await drive(stack, rng, WARM_UP_S)
        before = held(stack, metrics)
        traffic, preemptions = await drive(stack, rng, share * SOAK_S)
        print(model, dict(traffic.ends), f"{preemptions} preemptions", before, held(stack, metrics))
        eventually(lambda: not grown(before, held(stack, metrics)), "a process grew")
        assert len(traffic.ends) == 13, "every kind of request was among them"
        assert preemptions > 0, "pages never ran short"


def test_control_what_grew_is_named() -> None:
    before = {"frontend": Held(20, 8, 100, 30), "rank": Held(9, 4, 1000, 0)}
    assert grown(before, before) == {}
    for now in (Held(23, 8, 100, 30), Held(20, 11, 100, 30), Held(20, 8, 116, 30)):
        assert grown(before, before | {"frontend": now}).keys() == {"frontend"}
    assert grown(before, before | {"frontend": Held(20, 8, 100, 31)}), "one task is a leak"


def test_control_a_second_end_and_a_missing_one_are_seen() -> None:
    twice, never = Choices(Ask("a")), Choices(Ask("a", n=2))
    twice.add(0, "text", "stop")
    assert twice.whole() == ["text"]
    with pytest.raises(AssertionError, match="after the end"):
        twice.add(0, "", "stop")
    never.add(0, "text", "stop")
    with pytest.raises(AssertionError, match="no end"):
        never.whole()
