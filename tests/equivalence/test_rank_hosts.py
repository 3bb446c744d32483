"""Ranks of several hosts answer as one rank does: launchers of their own stand for hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_service.config import EngineConfig
from tests.equivalence.mixed_requests import SIZES
from tests.equivalence.test_rank_group import ROOT, TIMEOUT_S, answers
from tests.service.distant_ranks import TOKEN, start_far
from tests.waiting import PATIENCE_S, free_port

FORGETFUL = "tests.equivalence.missed_plan"


def flags_of(folder: Path, **more: Any) -> dict[str, Any]:
    token = folder / "token"
    token.write_text(TOKEN)
    where = {"leader_address": f"127.0.0.1:{free_port()}", "group_token_file": str(token)}
    return {**SIZES, **where, **more}


def arguments(flags: Mapping[str, Any]) -> list[str]:
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items())
    return [word for pair in pairs for word in pair]


def lws(index: int, size: int) -> dict[str, str]:
    """What a pod of a LeaderWorkerSet is told."""
    own = {"LWS_WORKER_INDEX": index, "LWS_GROUP_SIZE": size, "LWS_LEADER_ADDRESS": "nobody"}
    return {name: str(value) for name, value in own.items()}


def torchrun(rank: int, world: int) -> dict[str, str]:
    """What torchrun tells a process, one for a host."""
    own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return {**{name: str(value) for name, value in own.items()}, "MASTER_ADDR": "nobody"}


def told(
    model: str, num_ranks: int, flags: Mapping[str, Any], env: dict[str, str], num_stages: int = 1
) -> Any:
    """By rank 0, here, with ranks that others have started."""
    command = [sys.executable, "-m", "tests.equivalence.mixed_requests", model, str(num_ranks)]
    done = subprocess.run(
        [*command, str(num_stages), json.dumps(flags)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def answers_of_hosts(
    model: str,
    num_ranks: int,
    flags: Mapping[str, Any],
    envs: Sequence[dict[str, str]],
    num_stages: int = 1,
) -> Any:
    """`envs`: of the hosts, the first of which is rank 0's."""
    grid = {"tensor_parallel_size": num_ranks // num_stages, "pipeline_parallel_size": num_stages}
    every = {**flags, **grid}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "engine_service", model, *arguments(every)],
            cwd=ROOT,
            env={**os.environ, **env},
        )
        for env in envs[1:]
    ]
    try:
        found = told(model, num_ranks, flags, envs[0], num_stages)
        assert [node.wait(PATIENCE_S) for node in nodes] == [0] * len(nodes)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return found


@pytest.mark.timeout(600)
def test_hosts_answer_as_one_rank(tmp_path: Path) -> None:
    alone = answers("demo", 1)
    assert alone["preemptions"] > 0
    flags = flags_of(tmp_path, executor="torchrun")
    envs = [torchrun(rank, 2) for rank in range(2)]
    assert answers_of_hosts("demo", 2, flags, envs) == alone
    # The control: a rank of another host that misses plans changes the tokens.
    flags = flags_of(tmp_path, nnodes=2)
    config = EngineConfig(model="demo", tensor_parallel_size=2, **flags)
    with start_far(config, 1, module=FORGETFUL) as far:
        assert told("demo", 2, flags, {}) != alone
        assert far.wait(PATIENCE_S) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "num_stages"), [("demo", 1), ("demo", 2), ("demo-block", 2)])
def test_two_ranks_on_each_of_two_hosts_answer_as_one(
    tmp_path: Path, model: str, num_stages: int
) -> None:
    """Two stages: one on each host."""
    flags = flags_of(tmp_path, executor="lws")
    envs = [lws(index, 2) for index in range(2)]
    found = answers_of_hosts(model, 4, flags, envs, num_stages)
    assert found == (answers(model, 1) if num_stages == 1 else answers(model, 4, num_stages))
