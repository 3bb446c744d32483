"""Captured steps decide what launched ones do, alone and beside others, ahead of the host and in
line with it, for every kind of row."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_service.sampling import sampler
from engine_service.worker import graphs
from engine_service.worker.buckets import FILTERED, MAX_TOKENS, PLAIN
from engine_service.worker.layout import StepLayout
from tests.equivalence.replays import filter_as_plain, watch_choices
from tests.sampling_batches import choosing_all
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams, StructuredOutputsParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS: dict[str, list[dict[str, Any]]] = {
    "demo": [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.5, "logit_bias": {65: 3.0}, "min_tokens": 9},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[a-f ]{200}")},
    ],
    "demo-block": [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 2},
    ],
}


def requests(model: str, seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(32, 120) for _ in range(draw.choice([1, 5, 40, 90]))] for _ in range(count)
    ]
    kinds = [draw.choice(KINDS[model]) for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=draw.randint(kind.get("min_tokens", 1), 60),
            seed=number,
            ignore_eos=True,
            **kind,
        )
        for number, kind in enumerate(kinds)
    ]
    return prompts, params


FILTERS: list[dict[str, Any]] = [
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.3},
    {"temperature": 2.0, "min_p": 0.4},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 0.0},
]
"""They drop most of what would be drawn, beside rows that have none."""


def run(
    model: str, prompts, params, *, overlaps: bool = True, foreseen_tokens: int = 2048, **config
) -> list[list[int]]:
    llm = open_llm(model, **config)
    assert llm._loop._depth == 1
    llm._loop._depth = int(overlaps)
    planner = llm._loop._scheduler.planner
    planner._limits = replace(planner._limits, foreseen_tokens=foreseen_tokens)
    return answer(llm, prompts, params)


def open_llm(model: str, **config) -> LLM:
    return LLM(model, device="cuda", memory_fraction=0.2, **{"max_model_len": 256, **config})


def graphs_of(llm: Any) -> graphs.StepGraphs:
    made: graphs.StepGraphs = llm.engine.executor._runner._graphs
    return made


def answer(llm: LLM, prompts, params) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("model", ["demo", "demo-block"])
@pytest.mark.parametrize("max_rows", [3, 40])
def test_graphs_on_equals_graphs_off(model: str, max_rows: int, seed: int) -> None:
    prompts, params = requests(model, seed, 60)
    config = {"dtype": "float32", "max_rows": max_rows, "prefix_caching": False}
    captured = run(model, prompts, params, **config)
    launched = run(model, prompts, params, enforce_eager=True, **config)
    assert captured == launched


@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_filtered_rows_are_decided_inside_of_graphs(model: str, seed: int) -> None:
    """Beside plain ones; of two blocks, so few positions are final that all are decided."""
    prompts, _ = requests(model, seed, 20)
    params = [
        SamplingParams(max_tokens=30, seed=n, ignore_eos=True, **FILTERS[n % len(FILTERS)])
        for n in range(len(prompts))
    ]
    config = {"dtype": "float32", "max_rows": 2, "prefix_caching": False}
    llm = open_llm(model, **config)
    replayed = watch_choices(graphs_of(llm))
    captured = answer(llm, prompts, params)
    assert replayed.count(FILTERED) > 5
    assert set(replayed) <= {FILTERED, PLAIN}, "no decision is launched behind a graph"
    assert captured == run(model, prompts, params, enforce_eager=True, **config)
    filter_as_plain(graphs_of(llm))
    assert answer(llm, prompts, params) != captured, "the control"


def test_what_graphs_do_not_know_is_decided_behind_them(seed: int) -> None:
    """The control of what is watched."""
    prompts, _ = requests("demo", seed, 4)
    kind = {**FILTERS[0], "presence_penalty": 0.5}
    params = [SamplingParams(max_tokens=30, seed=n, ignore_eos=True, **kind) for n in range(4)]
    llm = open_llm("demo", dtype="float32", max_rows=2)
    replayed = watch_choices(graphs_of(llm))
    answer(llm, prompts, params)
    assert set(replayed) == {None}


@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_captured_prompts_are_launched_ones(
    model: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long ones, beside rows that go on, some of them scored."""
    draw = random.Random(seed)
    sizes = [30, 64, 500, 700, 1025, 1800]
    prompts = [[draw.randrange(32, 120) for _ in range(draw.choice(sizes))] for _ in range(24)]
    scored = [{"temperature": 0.0, "prompt_logprobs": 1}] if model == "demo" else []
    kinds = KINDS[model] + scored
    params = [
        SamplingParams(max_tokens=draw.randint(9, 60), seed=number, ignore_eos=True, **kind)
        for number, kind in enumerate(draw.choices(kinds, k=len(prompts)))
    ]
    replayed, forward = [], graphs.StepGraphs.forward

    def counted(self: graphs.StepGraphs, layout: StepLayout) -> torch.Tensor | None:
        hidden = forward(self, layout)
        replayed.append(0 if hidden is None else len(layout.places))
        return hidden

    monkeypatch.setattr(graphs.StepGraphs, "forward", counted)
    config = {"dtype": "float32", "max_rows": 5, "prefix_caching": False, "max_model_len": 2048}
    captured = run(model, prompts, params, token_budget=4096, **config)
    assert max(replayed) > MAX_TOKENS
    launched = run(model, prompts, params, token_budget=4096, enforce_eager=True, **config)
    assert captured == launched


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_overlap_on_equals_overlap_off(model: str, enforce_eager: bool, seed: int) -> None:
    """Seven rows for 60 requests: rows change hands while the step ahead is in flight."""
    prompts, params = requests(model, seed, 60)
    config = {"dtype": "float32", "max_rows": 7, "enforce_eager": enforce_eager}
    overlapped = run(model, prompts, params, **config)
    in_line = run(model, prompts, params, overlaps=False, **config)
    assert overlapped == in_line


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_blocks_planned_ahead_of_decisions_are_the_same(enforce_eager: bool, seed: int) -> None:
    prompts, params = requests("demo-block", seed, 60)
    config = {"dtype": "float32", "max_rows": 20, "enforce_eager": enforce_eager}
    foreseen = run("demo-block", prompts, params, foreseen_tokens=0, **config)
    in_line = run("demo-block", prompts, params, overlaps=False, **config)
    assert foreseen == in_line


@pytest.mark.parametrize("max_rows", [3, 40])
def test_a_head_over_open_positions_decides_the_same(
    max_rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a graph and launched, rounded up to kernels' sizes and as few as there are."""
    prompts, params = requests("demo-block", seed, 60)
    config = {"dtype": "float32", "max_rows": max_rows, "prefix_caching": False}
    with choosing_all():
        wanted = run("demo-block", prompts, params, **config)
    monkeypatch.setattr(graphs, "_MANY_FINAL", 1)
    for step in (sampler._OPEN_STEP, 1):
        monkeypatch.setattr(sampler, "_OPEN_STEP", step)
        assert run("demo-block", prompts, params, **config) == wanted
        assert run("demo-block", prompts, params, enforce_eager=True, **config) == wanted


@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_a_request_alone_and_among_others_gets_the_same_tokens(model: str, seed: int) -> None:
    prompts, _ = requests(model, seed, 64)
    greedy = [SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)] * 64
    together = run(model, prompts, greedy, dtype="float32")
    llm = LLM(model, device="cuda", dtype="float32", max_model_len=256, memory_fraction=0.2)
    for number in (0, 17, 63):
        (output,) = llm.generate([prompts[number]], greedy[:1], use_tqdm=False)
        assert output.outputs[0].token_ids == together[number]


def test_a_graph_reads_this_steps_tables(seed: int) -> None:
    """Negative control of the comparison: other prompts give other tokens through one graph."""
    llm = LLM("demo", device="cuda", dtype="float32", max_model_len=256, memory_fraction=0.2)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    seen = {
        tuple(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in ([65, 66, 67], [97, 100, 100], [50, 51, 52, 53])
    }
    assert len(seen) > 1
