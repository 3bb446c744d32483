"""Two GPUs of one host answer as one does in float32, however a model is shared between them; a
lost rank ends the group in time and leaves the devices as they were."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine_service.sampling.batch import DecideResult
from engine_service.worker.outcome import Outcome, write_tokens
from tests.e2e.test_llm_ranks import LEFT_BEHIND, LOST, PROMISED_S, STAGES, TENSOR
from tests.e2e.test_llm_ranks import run as run_program
from tests.equivalence.test_expert_parallel import check_split
from tests.equivalence.test_pipeline_parallel import check_scored, differing, wrong_answers
from tests.equivalence.test_rank_group import answers
from tests.service.test_engine_ranks import lose
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]
FLAGS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "memory_fraction": 0.12}
SMALL = FLAGS | {"num_pages": 64}
"""Of many engines in one process."""
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
SPARE = 64 << 20
"""Bytes of a device that others, or its driver, may take or give back meanwhile."""


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_two_shares_answer_as_one(model: str, enforce_eager: bool) -> None:
    """Sums over peer memory, and NCCL's, captured in graphs and not."""
    flags = FLAGS | {"enforce_eager": enforce_eager}
    alone = answers(model, 1, **flags)
    assert answers(model, 2, **flags) == alone
    assert alone["preemptions"] > 0


@FOUR
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_four_shares_answer_as_one(model: str) -> None:
    assert answers(model, 4, **FLAGS) == answers(model, 1, **FLAGS)


@FOUR
def test_four_ranks_of_two_stages_answer_as_one() -> None:
    assert not differing(answers("demo", 1, **FLAGS), answers("demo", 4, 2, **FLAGS))


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_two_stages_answer_as_one(model: str, enforce_eager: bool) -> None:
    """With as many steps in flight as there are stages, whose layers are captured and not."""
    flags = FLAGS | {"enforce_eager": enforce_eager}
    whole, staged = answers(model, 1, **flags), answers(model, 2, 2, **flags)
    assert not differing(whole, staged)
    assert staged["preemptions"] > 0
    assert (staged["live"], whole["live"]) == (2, 2)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_what_is_told_beside_tokens_is_the_same(model: str, num_stages: int) -> None:
    alone = answers(model, 1, module="scored_requests", **FLAGS)
    check_scored(answers(model, 2, num_stages, module="scored_requests", **FLAGS), alone)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_architectures_answer_as_one(tmp_path: Path, num_stages: int) -> None:
    """Tied embeddings, blocks, experts, and canvases whose keys are chosen."""
    names = ["qwen3-tied", "sdar", "qwen3-moe", "llada2-moe", "llada-sparse-heads"]
    assert not wrong_answers(tmp_path, names, [(2, num_stages)], **SMALL)


def test_whole_experts_answer_as_one(tmp_path: Path) -> None:
    check_split(tmp_path, ((2, 1),), **SMALL)


def taken() -> list[int]:
    """Bytes of both devices that somebody has."""
    torch.cuda.empty_cache()
    told = [torch.cuda.mem_get_info(number) for number in range(2)]
    return [total - free for free, total in told]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_lost_rank_ends_the_engine_and_frees_its_memory(
    rank: int, sent: signal.Signals, num_stages: int
) -> None:
    before = taken()
    await lose(rank, sent, num_stages, device="cuda", memory_fraction=0.12)
    await until(lambda: all(now <= was + SPARE for now, was in zip(taken(), before, strict=True)))


@pytest.mark.parametrize("size", [TENSOR, STAGES])
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGSTOP"])
def test_a_program_goes_on_without_its_ranks(sent: str, size: str) -> None:
    """What its own device waits for is given up, in every group of the library's."""
    first, second, last = run_program(LOST.format(sent=sent), "cuda", size, PROMISED_S)
    assert first.startswith("EngineDead rank 1 (pid ")
    assert last == "the program goes on"
    assert second.startswith("again")


@pytest.mark.parametrize("size", [TENSOR, STAGES])
def test_a_program_leaves_a_rank_that_hears_no_more(size: str) -> None:
    """Its own device waits within a step for what is not computed any more."""
    left = run_program(LEFT_BEHIND, "cuda", size, PROMISED_S)
    assert left == ["interrupted", "False"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_what_another_stage_decided_is_written_without_waiting() -> None:
    """Else rank 0 would wait for all steps in flight to learn of the oldest."""
    device = torch.device("cuda", 0)
    tokens = torch.zeros(3, 8, dtype=torch.int64, device=device)
    tables: Any = SimpleNamespace(sampling=SimpleNamespace(tokens=tokens), width=8, device=device)
    part = SimpleNamespace(rows=np.array([0, 2]), positions=np.array([1, 7]))
    rest = dict.fromkeys(("final", "logprobs", "logprob_ids", "ranks"))
    decided = DecideResult(token_ids=torch.tensor([5, 6]).pin_memory(), **rest)
    layout: Any = SimpleNamespace(decides=(part,))
    torch.cuda.set_sync_debug_mode("error")
    try:
        write_tokens(tables, layout, Outcome([decided]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.view(-1).nonzero().flatten().tolist() == [1, 23]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_parts_of_all_sizes_are_added_and_waited_for(num_ranks: int) -> None:
    """Bit for bit as the reference; controls: ranks that do not wait add what is not there, however
    it comes to them, and rows that are not taken as they come are not there."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    command = [sys.executable, "-m", "tests.gpu.peer_sums", str(num_ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["0", "4", str(int(num_ranks > 2))]


def test_parts_of_many_rows_are_pushed_and_waited_for() -> None:
    """Bit for bit as parts that are read; control: ranks that do not wait add what is not there."""
    command = [sys.executable, "-m", "tests.gpu.pushed_sums"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong, unwaited = map(int, done.stdout.split())
    assert wrong == 0
    assert unwaited > 0
