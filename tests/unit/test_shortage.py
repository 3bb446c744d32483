"""Memory that runs out: in a start-up it names the stage and the flags, in a step too; graphs that
do not fit are done without. Real allocations of the CPU fail where they can."""

from __future__ import annotations

import errno
import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engine_service import rank
from engine_service.attention.select import create_backend
from engine_service.config import EngineConfig
from engine_service.core.messages import Fatal
from engine_service.distributed import Group
from engine_service.out_of_memory import is_out_of_memory
from engine_service.worker import graphs, memory, worker
from engine_service.worker.buckets import Bucket
from engine_service.worker.worker import Worker
from tests.service.test_engine_rank import MODEL
from tidemill.llm import LLM
from tidemill.runtime.errors import EngineDead, InvalidRequest
from tidemill.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[40, 41, 42], [60, 61]]
SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def raising(error: Exception) -> Any:
    def fail(*args: object, **named: object) -> None:
        raise error

    return fail


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def demo(**values: Any) -> LLM:
    return LLM("demo", device="cpu", max_model_len=64, max_rows=2, **values)


def refusal(config: EngineConfig) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        rank.compose(config, lambda *_: None)
    assert caught.value.reason == "OUT_OF_MEMORY"
    assert int(caught.value.facts["free_bytes"]) > 0
    return caught.value


def test_weights_that_do_not_fit_name_their_size_and_what_helps(tmp_path: Path) -> None:
    huge = {**MODEL, "vocab_size": 1 << 42, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", dtype="float32")
    told = refusal(config).message
    assert (4 * 32 << 42) < int(told.split(" bytes)")[0].rsplit("(")[-1]) < (4 * 33 << 42)
    assert "in float32: pass --dtype bfloat16 (half of that)" in told
    assert "were free" in told
    assert "--dtype" not in refusal(replace(config, dtype="bfloat16")).message


def test_pages_that_do_not_fit_name_their_flags() -> None:
    config = EngineConfig(model="demo", device="cpu", max_rows=7, num_pages=(1 << 31) - 1)
    told = refusal(config).message
    assert "pass less --num-pages, --memory-fraction, --max-rows (now 7)" in told


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("find_room", ["--token-budget (now 1024)", "--logit-budget", "--max-rows"]),
        ("open_backend", ["--token-budget (now 1024)"]),
        ("KVPool", ["--num-pages", "--memory-fraction", "--max-model-len"]),
    ],
)
def test_later_stages_name_their_flags(
    name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, name, raising(SHORT))
    told = refusal(EngineConfig(model="demo", device="cpu")).message
    assert all(flag in told for flag in flags), told


def test_other_failures_of_a_stage_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "find_room", raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        rank.compose(EngineConfig(model="demo", device="cpu"), lambda *_: None)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (SHORT, True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
    try:
        raise error
    except Exception as first:
        second = KeyError("cleaning up failed too")
        second.__context__ = first
    assert is_out_of_memory(second) is is_one


def test_a_step_without_memory_is_fatal_and_names_the_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = demo()
    executor = llm.engine.executor
    assert isinstance(executor, Worker)
    monkeypatch.setattr(executor._runner, "launch", raising(SHORT))
    with pytest.raises(EngineDead, match=r"step of 2 rows and 5 tokens: .*--memory-fraction.*--"):
        tokens(llm)


def test_graphs_without_memory_are_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(demo())
    freed: list[str] = []
    monkeypatch.setattr(Worker, "_list_buckets", lambda *_: [Bucket(2, 2, 1, 2)])
    monkeypatch.setattr(graphs, "StepGraphs", raising(SHORT))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "set_stream", freed.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("the cache"))
    with caplog.at_level(logging.WARNING, "tidemill.rank"):
        llm = demo()
    assert freed == ["the stream", "the cache"]
    (record,) = caplog.records
    assert "CUDA graphs of 1 steps" in record.getMessage()
    assert tokens(llm) == expected
    monkeypatch.setattr(graphs, "StepGraphs", raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        demo()


def test_eager_by_flag_or_by_attention_means_no_sizes_to_capture() -> None:
    """On a GPU; here no step is captured anyway."""
    executor = demo().engine.executor
    assert isinstance(executor, Worker)
    triton, sdpa = (
        create_backend(name, executor._runner._program.backend.shape) for name in ("triton", "sdpa")
    )
    config = EngineConfig()
    assert executor._list_buckets(config, triton, False) == []
    executor.device = torch.device("cuda")
    assert executor._list_buckets(config, triton, False)  # control
    assert executor._list_buckets(replace(config, enforce_eager=True), triton, False) == []
    assert executor._list_buckets(config, sdpa, False) == []


def test_all_steps_run_ahead_of_their_capture_on_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each other one would keep a workspace of cuBLAS for good."""
    made: list[Mock] = []
    used: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: made.append(Mock()) or made[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda side: used.append(side) or nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    ours, other = (graphs.StepGraphs.__new__(graphs.StepGraphs) for _ in range(2))
    ours._pool = other._pool = None
    for _ in range(3):
        assert ours._record(lambda: 5)[1] == 5
    assert len(made) == 1
    assert used == made * 3
    other._record(lambda: 5)
    assert len(made) == 2, "the control"


def test_of_several_ranks_none_does_without_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' sums are those of padded steps: they would wait for ever."""
    executor = demo().engine.executor
    assert isinstance(executor, Worker)
    executor.group = Group(1, 2)
    monkeypatch.setattr(Group, "all_of", lambda self, fact: [True, fact])
    monkeypatch.setattr(graphs, "StepGraphs", raising(SHORT))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    with pytest.raises(InvalidRequest, match=r"of this rank do not fit: .*--enforce-eager"):
        executor._capture(executor._runner._program, [Bucket(2, 2, 1, 2)])
    # One whose attention cannot be captured has no sizes: then nobody captures any.
    assert executor._capture(executor._runner._program, []) is None
    monkeypatch.setattr(Group, "all_of", lambda self, fact: [False, fact])
    assert executor._capture(executor._runner._program, [Bucket(2, 2, 1, 2)]) is None


class Wire:
    """A pipe with one message to read."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.sent: list[Any] = []

    def receive(self, timeout_s: float | None) -> list[EngineConfig]:
        return [self.config]

    def send(self, batch: list[Any]) -> None:
        self.sent += batch


def test_the_rank_process_says_it_and_ends_with_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank.log, "configure", lambda *_, **__: None)
    monkeypatch.setattr(worker, "find_room", raising(SHORT))
    wire = Wire(EngineConfig(model="demo", device="cpu"))
    assert rank._serve(wire) == 1  # type: ignore[arg-type]
    assert isinstance(wire.sent[-1], Fatal)
    assert wire.sent[-1].message.startswith("out of memory on cpu")


def test_free_bytes_of_the_cpu_are_plausible() -> None:
    assert 0 < memory.free_bytes(torch.device("cpu")) == pytest.approx(memory.free_ram(), rel=0.5)
