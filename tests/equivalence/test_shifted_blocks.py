"""Block diffusion over shifted logits (Fast-dLLM v2): position p is decided from query p - 1."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine_service.core.step import Span
from engine_service.core.strategy import Budget, View
from engine_service.decoding.block_diffusion import BlockDiffusion
from tests.equivalence.engine_runs import run
from tests.equivalence.harness import BLOCK, Setup, ToyEngine
from tests.equivalence.references import random_knobs, random_prompt, reference_block
from tests.equivalence.test_worker_engine import SETUPS, Dense, make_engine, make_prompts
from tests.fakes import MASK, ToyModel
from tests.models.checkpoints import Case, write


class Shifted:
    """A model whose logits at p are those of query p - 1."""

    def __init__(self, model: ToyModel | Dense) -> None:
        self._model = model

    def dense(self, tokens: list[int], block: int) -> torch.Tensor:
        return self._model.dense(tokens, block).roll(1, dims=0)


class Careless(BlockDiffusion):
    """Stores the keys and values of the query ahead of its block once more."""

    def plan(self, view: View, budget: Budget) -> Span | None:
        span = super().plan(view, budget)
        return None if span is None else span._replace(store_from=0)


def is_private(engine: ToyEngine) -> bool:
    """Whether the step launched last stores into pages that nobody else can read alone."""
    pages, plan = engine.pages, engine.plans[-1]
    return all(
        pages._refs[page] == 1 and page not in pages._key_of
        for span in plan.spans
        for position in range(max(span.start, span.store_from), span.stop)
        for page in [engine.executor.tables.pages[span.row][position // pages.page_size]]
    )


def wrong_and_shared(kind: type[BlockDiffusion], seed: int) -> tuple[int, int]:
    """Requests whose tokens differ from the reference, and steps that wrote into shared pages."""
    rng, model = random.Random(seed), ToyModel(seed)
    tight = Setup(num_pages=rng.choice([20, 64]), token_budget=rng.choice([5, 12, 64]))
    engine = ToyEngine(
        model,
        tight,
        strategies={BLOCK: kind(block=4, mask_token_id=MASK, logits_shift=1)},
        default_method=BLOCK,
        shifts={BLOCK: 1},
    )
    shared = random_prompt(rng, 8, 8)
    asked = {}
    for _ in range(6):
        prompt, knobs = shared + random_prompt(rng, 0, 9), random_knobs(rng, 4)
        asked[engine.submit(prompt, 14, BLOCK, knobs)] = (prompt, knobs)
    num_shared = 0
    while engine.scheduler.has_work:
        # The plan is looked at with the pages as they were when it was made.
        num_plans = len(engine.plans)
        plan = engine.scheduler.schedule()
        if plan is not None:
            engine.plans.append(plan)
            handle = engine.executor.launch(plan)
            num_shared += not is_private(engine)
            engine.scheduler.apply(plan, engine.executor.collect(handle))
        engine.collect_output()
        assert len(engine.plans) == num_plans + 1 or not engine.scheduler.has_work
        if rng.random() < 0.1:
            engine.preempt(rng.choice(list(asked)))
    engine.check_empty()
    wrong = [
        engine.results[key].tokens != reference_block(Shifted(model), prompt, 14, 4, knobs)
        for key, (prompt, knobs) in asked.items()
    ]
    return sum(wrong), num_shared


def test_shifted_blocks_equal_the_dense_loop() -> None:
    assert [wrong_and_shared(BlockDiffusion, seed) for seed in range(8)] == [(0, 0)] * 8


def test_control_a_query_that_is_stored_again_writes_into_shared_pages() -> None:
    assert sum(wrong_and_shared(Careless, seed)[1] for seed in range(4)) > 0


def as_fast_dllm(config: dict) -> None:
    """Fast-dLLM v2's weights are Qwen2's."""
    config |= {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 8,
        "mask_token_id": MASK,
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, Dense]:
    folder = tmp_path_factory.mktemp("fast_dllm")
    case = Case(name="fast_dllm", kind="Qwen2", edit=as_fast_dllm)
    return folder, Dense(write(case, folder, seed=5))


@pytest.mark.parametrize("setup", [SETUPS[0], {**SETUPS[1], "token_budget": 9}, SETUPS[3]])
def test_the_worker_equals_the_dense_loop(checkpoint, setup) -> None:
    folder, dense = checkpoint
    rng = random.Random(3)
    prompts = make_prompts(rng, 6)
    knobs = [random_knobs(rng, 8) for _ in prompts]
    outputs, _ = run(make_engine(folder, **setup), prompts, 20, knobs)
    for prompt, knob, output in zip(prompts, knobs, outputs, strict=True):
        assert output == reference_block(Shifted(dense), prompt, 20, 8, knob)
