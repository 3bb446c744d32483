"""What ranks that share a model answer beside greedy and drawn tokens: vectors, scores, masks."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_service.composition import Engine
from engine_service.core.messages import Submit
from engine_service.core.params import DecodingChoice, PoolChoice, SamplingParams
from engine_service.distributed import Group
from engine_service.worker import device, worker
from tests.equivalence import pooling, ranks_in_threads
from tests.equivalence.ranks_in_threads import run_ranks
from tests.equivalence.shapes import SHAPES
from tests.models.encoders import write
from tidemill.runtime.errors import FailedPrecondition, Unsupported

CLOSE = 1e-5
PROMPTS = [[random.Random(8).randrange(120) for _ in range(size)] for size in (1, 2, 30, 13, 64)]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = {
        "BertModel": {},
        "RobertaForSequenceClassification": {"num_labels": 3, "max_position_embeddings": 66},
    }
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in kinds}
    for kind, options in kinds.items():
        write(folders[kind], kind, **options)
    return folders


def vectors(engine: Engine) -> list[np.ndarray]:
    for key, prompt in enumerate(PROMPTS):
        pooling.submit(engine, key, prompt, PoolChoice())
    outcome = pooling.run(engine)
    return [outcome.vector(key) for key in range(len(PROMPTS))]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["BertModel", "RobertaForSequenceClassification"])
def test_encoders_give_the_same_vectors(
    encoders: dict[str, Path], kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, Any] = {"model": str(encoders[kind]), "max_model_len": 64, "max_rows": 3}
    (alone,) = run_ranks(monkeypatch, 1, vectors, **flags)
    together = run_ranks(monkeypatch, size, vectors, **flags)
    for found in together:
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, atol=CLOSE, rtol=CLOSE)
    assert not np.allclose(alone[0], alone[1], atol=100 * CLOSE)


REQUESTS: list[dict[str, Any]] = [
    {"logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 3, "logprobs": 0},
    {"temperature": 1.2, "seed": 4, "min_p": 0.2, "prompt_logprobs": 0},
    {"temperature": 0.8, "seed": 5, "top_k": 2, "logprobs": 1},
    {"temperature": 1.0, "seed": 6, "top_p": 0.6, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 5},
    {"logit_bias": {300: 4.0, 5: -3.0}, "min_tokens": 6, "logprobs": 1},
    {"allowed_token_ids": (3, 81, 160, 316), "temperature": 1.5, "seed": 7, "logprobs": 2},
    {"bad_words": ((7,), (9, 4)), "temperature": 1.5, "seed": 8},
]
"""Of every kind that looks at whole logits; the last ids are those of the last rank."""


def answers(engine: Engine, knobs: dict[str, Any]) -> Any:
    """Tokens, and all that was scored, request by request."""
    tokens: list[list[int]] = [[] for _ in REQUESTS]
    ids: list[Any] = [[] for _ in REQUESTS]
    values: list[list[float]] = [[] for _ in REQUESTS]
    rng = random.Random(2)
    for key, wishes in enumerate(REQUESTS):
        prompt = [rng.randrange(300) for _ in range(rng.randint(1, 20))]
        wishes = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12} | wishes
        if engine.facts.mask_token_id is not None:
            wishes.pop("prompt_logprobs", None)
        sampling = SamplingParams(**wishes)
        submit = Submit(
            key=key,
            request_id=str(key),
            prompt=struct.pack(f"<{len(prompt)}I", *prompt),
            sampling=sampling,
            decoding=DecodingChoice(params=knobs),
        )
        with contextlib.suppress(Unsupported):  # by this method
            engine.scheduler.submit(submit)
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        engine.scheduler.apply(plan, engine.executor.collect(engine.executor.launch(plan)))
        output = engine.scheduler.emit()
        if output is None:
            continue
        new = iter(struct.unpack(f"<{len(output.token_ids) // 4}I", output.token_ids))
        for key, size in zip(output.keys, output.counts, strict=True):
            tokens[key] += [next(new) for _ in range(size)]
        scored = [(row, entries) for row, entries in output.logprobs]
        scored += [(row, entries) for row, _, entries in output.prompt_logprobs]
        for row, entries in scored:
            for entry in filter(None, entries):
                ids[output.keys[row]].append((entry.token_ids, entry.rank))
                values[output.keys[row]] += entry.logprobs
    return tokens, ids, values


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["qwen3-tied", "sdar", "llada"])
def test_whatever_looks_at_whole_logits_gets_the_same(
    tmp_path: Path, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    flags: dict[str, Any] = {
        "model": str(tmp_path), "load_format": "dummy", "max_rows": 4, "max_model_len": 64,
        "page_size": 8, "seed": 3,
    }  # fmt: skip
    (alone,) = run_ranks(monkeypatch, 1, lambda engine: answers(engine, shape.knobs), **flags)
    together = run_ranks(monkeypatch, size, lambda engine: answers(engine, shape.knobs), **flags)
    assert len({tuple(one) for one in alone[0]}) > 5
    for found in together:
        assert found[:2] == alone[:2]
        for one, other in zip(found[2], alone[2], strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    assert all(found == together[0] for found in together), "ranks differ in a bit"


def test_logits_in_another_order_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-tied"].config))
    flags: dict[str, Any] = {"model": str(tmp_path), "load_format": "dummy", "max_model_len": 64}
    (alone,) = run_ranks(monkeypatch, 1, lambda engine: answers(engine, {}), **flags)
    real = ranks_in_threads.Meeting.all_of

    def swapped(self: Any, rank: int, fact: Any) -> list[Any]:
        return real(self, rank, fact)[::-1]

    monkeypatch.setattr(ranks_in_threads.Meeting, "all_of", swapped)
    together = run_ranks(monkeypatch, 2, lambda engine: answers(engine, {}), **flags)
    assert together[0][0] != alone[0]


def fail_once(monkeypatch: pytest.MonkeyPatch, stage: str, *failing: int) -> list[str]:
    """Kernels seem to run, until this stage of these ranks; returns who has given them up."""
    given_up: list[str] = []
    real = getattr(worker, stage)

    def run(*args: Any) -> Any:
        rank = int(threading.current_thread().name)
        if rank in failing and str(rank) not in given_up:
            raise RuntimeError("Triton Error [CUDA]: an illegal instruction")
        return real(*args)

    def give_up(device: torch.device, fault: str) -> None:
        given_up.append(threading.current_thread().name)

    monkeypatch.setattr(worker, stage, run)
    monkeypatch.setattr(device, "kernel_fault", lambda device: None)
    monkeypatch.setattr(device, "give_up_kernels", give_up)
    monkeypatch.setattr(device, "tell_kernel_fault", lambda device: None)
    # Who fails alone waits in vain; where both fail, a stall of one is no reason to end.
    patience_s = 0.5 if len(failing) == 1 else ranks_in_threads.TIMEOUT_S
    monkeypatch.setattr(device, "_FAILURES_S", patience_s)
    return given_up


@pytest.mark.parametrize("stage", ["find_room", "build_kernels"])
@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_a_kernel_that_fails_on_one_rank_alone_ends_all(
    tmp_path: Path, failing: tuple[int, ...], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails on all is done without."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3"].config))
    flags: dict[str, Any] = {"model": str(tmp_path), "load_format": "dummy", "max_model_len": 64}
    given_up = fail_once(monkeypatch, stage, *failing)
    alone = pytest.raises(RuntimeError, match="illegal instruction")
    with contextlib.nullcontext() if len(failing) == 2 else alone:
        run_ranks(monkeypatch, 2, lambda engine: None, **flags)
    assert sorted(given_up) == sorted(map(str, failing))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("weight_version", "rank 1 has weight_version 'other', rank 0 '.*rsync -a"),
        ("dtype", "rank 1 has dtype 'float16', rank 0 'float32': .* .--dtype float16"),
        ("max_rows", "rank 1 has max_rows 9, rank 0 64: "),
        ("eos_token_ids", "rank 1 has eos_token_ids .*7.*, rank 0 .* generation_config.json"),
    ],
)
def test_ranks_that_would_load_something_else_are_told_before_they_load(
    tmp_path: Path, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on hosts whose files, GPUs or memory differ: it may take minutes to read the weights."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3"].config))
    others: dict[str, Any] = {"weight_version": "other", "dtype": torch.float16, "max_rows": 9}
    others["eos_token_ids"] = (7,)

    def differing(real: Any, field: str) -> Any:
        def made(*args: Any, **named: Any) -> Any:
            found = real(*args, **named)
            if field != name or threading.current_thread().name != "1":
                return found
            return others[name] if name == "dtype" else replace(found, **{name: others[name]})

        return made

    for function, field in (
        ("fetch_checkpoint", "weight_version"),
        ("resolve_dtype", "dtype"),
        ("resolve", "max_rows"),
        ("read_traits", "eos_token_ids"),
    ):
        monkeypatch.setattr(worker, function, differing(getattr(worker, function), field))
    monkeypatch.setattr(worker, "load_model", lambda *_, **__: pytest.fail("it has been read"))
    flags: dict[str, Any] = {"model": str(tmp_path), "load_format": "dummy", "max_model_len": 64}
    with pytest.raises(FailedPrecondition, match=told) as caught:
        run_ranks(monkeypatch, 2, lambda engine: None, **flags)
    assert caught.value.reason == "RANKS_DIFFER"


def test_kernels_run_on_all_ranks_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    there, given_up = torch.device("cuda", 1), list[str]()
    monkeypatch.setattr(device, "kernel_fault", lambda _: None)
    monkeypatch.setattr(device, "tell_kernel_fault", lambda _: None)
    monkeypatch.setattr(device, "give_up_kernels", lambda _, fault: given_up.append(fault))
    monkeypatch.setattr(Group, "all_of", lambda self, fact: ["Triton needs 8.0", fact])
    device.agree_on_kernels(there, Group(1, 2))
    assert given_up == ["rank 0 has none: Triton needs 8.0"]
    monkeypatch.setattr(Group, "all_of", lambda self, fact: [None, fact])
    device.agree_on_kernels(there, Group(1, 2))
    assert len(given_up) == 1
