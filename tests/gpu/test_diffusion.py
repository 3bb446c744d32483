"""Canvases, their caches and diffusion models with experts decide on a CUDA device what they decide
on the CPU, where the slow oracles have judged them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service import resolve
from engine_service.worker import graphs
from engine_service.worker.layout import StepLayout
from tests.equivalence.test_worker_canvas import VOCAB, as_dream, write_llada
from tests.models.checkpoints import Case, write
from tests.models.test_experts_with_masks import LLADA, SDAR
from tests.models.test_llada2_moe import Reference
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]
ANSWER = 48
CACHES: list[dict[str, Any]] = [
    {},
    {"cfg_scale": 1.5},
    {"cache": "prefix"},
    {"cache": "dual"},
    {"cache": "dual", "refresh_interval": 3},
    {"cache": "sparse", "retention_ratio": 0.5},
    {"cache": "sparse", "retention_ratio": 0.3, "head_select": True, "delay_step": 2},
    {"cache": "sparse", "retention_ratio": 0.8, "pool_kernel": 7, "refresh_interval": 4},
]
TIGHT = {"page_size": 16, "num_pages": 40, "token_budget": 192, "max_rows": 5}
"""Fewer pages and tokens than all requests would take at once."""


def random_prompts(seed: int, count: int, vocab: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(draw.randint(1, 40))] for _ in range(count)]


def canvas_knobs(seed: int, count: int, first: int = 0) -> list[dict[str, Any]]:
    """Every cache in turn, with blocks of several lengths and thresholds."""
    draw = random.Random(seed)
    return [
        {
            "block_length": draw.choice([8, 16, 24, 40]),
            "threshold": draw.choice([0.3, 0.6, 0.9, 2.0]),
            **CACHES[(first + index) % len(CACHES)],
        }
        for index in range(count)
    ]


def answers(
    folder: Path,
    device: str,
    prompts: list[list[int]],
    params: list[SamplingParams],
    **flags: Any,
) -> list[list[int]]:
    settings = {"dtype": "float32", "max_model_len": 128, "max_rows": 6, **flags}
    if device == "cuda":
        settings["memory_fraction"] = 0.2
    llm = LLM(str(folder), device=device, skip_tokenizer_init=True, **settings)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def tokens(
    folder: Path,
    device: str,
    prompts: list[list[int]],
    knobs: Sequence[dict[str, Any]],
    **flags: Any,
) -> list[list[int]]:
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=ANSWER, ignore_eos=True, seed=number, method_params=one
        )
        for number, one in enumerate(knobs)
    ]
    return answers(folder, device, prompts, params, **flags)


def watch_replays(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, bool]]:
    """Which kinds of graphs were asked for a step, and whether one had room."""
    seen: set[tuple[str, bool]] = set()

    def watched(name: str) -> Any:
        replay = getattr(graphs.StepGraphs, name)

        def call(self: graphs.StepGraphs, layout: StepLayout) -> Any:
            result = replay(self, layout)
            seen.add((name, result is not None))
            return result

        return call

    for name in ("run", "forward"):
        monkeypatch.setattr(graphs.StepGraphs, name, watched(name))
    return seen


@pytest.mark.parametrize("knobs", CACHES, ids=str)
def test_whole_canvases_are_replayed(
    knobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cache at a time; blocks longer than those of captured steps, filters and
    log-probabilities included."""
    replayed = watch_replays(monkeypatch)
    write_llada(tmp_path, 7)
    prompts = random_prompts(9, 12, VOCAB)
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"temperature": 3.0, "top_k": 9}]
    params = [
        SamplingParams(
            max_tokens=ANSWER,
            ignore_eos=True,
            seed=number,
            method_params={"block_length": (8, 48)[number % 2], "threshold": 0.6, **knobs},
            **{"temperature": 0.0, **kinds[number % 3]},
        )
        for number in range(12)
    ]
    eager = answers(tmp_path, "cuda", prompts, params, enforce_eager=True)
    assert answers(tmp_path, "cuda", prompts, params) == eager
    assert ("forward", True) in replayed
    if knobs in ({}, {"cache": "prefix"}, {"cache": "dual"}):
        assert ("forward", False) not in replayed, "nothing is launched"
    other = [replace(one, seed=one.seed + 99) for one in params]
    assert answers(tmp_path, "cuda", prompts, other) != eager, "the control: other seeds"


@pytest.mark.parametrize("flags", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["MHA", "GQA"])
def test_canvases_with_every_cache(
    kv_heads: int, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds in one engine: steps mix spans over the pages with spans aside of them."""
    replayed = watch_replays(monkeypatch)
    write_llada(tmp_path, 7, n_kv_heads=kv_heads)
    prompts, knobs = random_prompts(1, 24, VOCAB), canvas_knobs(2, 24)
    want = tokens(tmp_path, "cpu", prompts, knobs)
    assert tokens(tmp_path, "cuda", prompts, knobs, **flags) == want
    assert replayed >= {("run", True), ("run", False), ("forward", True)}
    assert tokens(tmp_path, "cuda", prompts, knobs, enforce_eager=True, **flags) == want
    other = canvas_knobs(2, 24, first=3)
    assert tokens(tmp_path, "cpu", prompts, other) != want, "the control: other caches"


@pytest.mark.parametrize("chunk", [4096, 40])
def test_captured_blocks_that_need_whole_logits(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and filters beside plain rows: their steps are replayed to the hidden
    states, or launched where that would be too many logits."""
    monkeypatch.setattr(resolve, "_LOGIT_CHUNK_BYTES", 4 * VOCAB * chunk)
    write_llada(tmp_path, 7)
    prompts = random_prompts(8, 12, VOCAB)
    kinds: list[dict[str, Any]] = [{"logprobs": 2}, {}, {"temperature": 3.0, "top_k": 9}]
    params = [
        SamplingParams(
            max_tokens=ANSWER,
            ignore_eos=True,
            seed=number,
            method_params={"cache": "dual", "block_length": 16, "threshold": 0.6},
            **{"temperature": 0.0, **kinds[number % 3]},
        )
        for number in range(12)
    ]
    eager = answers(tmp_path, "cuda", prompts, params, enforce_eager=True)
    assert answers(tmp_path, "cuda", prompts, params) == eager


def test_dreams_canvas(tmp_path: Path) -> None:
    """Logits of the position before, steps that draw positions, and every third request guided."""
    write(Case(name="dream", kind="Qwen2", edit=as_dream), tmp_path, seed=5)
    prompts = random_prompts(3, 8, VOCAB)
    rules = ("maskgit_plus", "topk_margin", "entropy", "origin")
    knobs = [{"remasking": rules[index % 4], "steps": 12} for index in range(8)]
    knobs[::3] = [{**guided, "cfg_scale": 1.5} for guided in knobs[::3]]
    want = tokens(tmp_path, "cpu", prompts, knobs)
    assert tokens(tmp_path, "cuda", prompts, knobs) == want
    assert tokens(tmp_path, "cpu", prompts, knobs[1:] + knobs[:1]) != want, "the control"


def write_experts(name: str, folder: Path) -> int:
    """Vocabulary size of the checkpoint that was written."""
    if name == "llada2":
        reference = Reference(3, hidden_size=64, moe_intermediate_size=32, intermediate_size=64)
        reference.save(folder)
        return int(reference.config["vocab_size"]) - 1
    write({"sdar-moe": SDAR, "llada-moe": LLADA}[name], folder, seed=3)
    return VOCAB - 1


@pytest.mark.parametrize("name", ["sdar-moe", "llada2", "llada-moe"])
def test_models_with_experts(name: str, tmp_path: Path) -> None:
    """Captured and launched; the CPU multiplies expert by expert."""
    vocab = write_experts(name, tmp_path)
    prompts = random_prompts(4, 16, vocab)
    knobs = [{"threshold": (0.2, 0.5, 0.9, 2.0)[index % 4]} for index in range(16)]
    want = tokens(tmp_path, "cpu", prompts, knobs)
    for enforce_eager in (False, True):
        assert tokens(tmp_path, "cuda", prompts, knobs, enforce_eager=enforce_eager) == want
    assert tokens(tmp_path, "cpu", prompts[1:] + prompts[:1], knobs) != want, "the control"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_of_a_canvas_waits_while_it_is_launched(tmp_path: Path) -> None:
    """Refreshes, kept keys and guidance included."""
    write_llada(tmp_path, 7)
    llm = LLM(str(tmp_path), device="cuda", dtype="float32", max_model_len=128, max_rows=8,
              memory_fraction=0.2, skip_tokenizer_init=True)  # fmt: skip
    prompts = random_prompts(5, 8, VOCAB)
    for turn in range(2):
        for prompt, one in zip(prompts, canvas_knobs(6, 8), strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=ANSWER, method_params=one)
            llm.add_request(prompt, params)
        # What is compiled, and what the allocators set aside at first, may wait.
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            while llm.has_unfinished_requests:
                llm.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
