"""Unmask rules in the engine: their limits, progress, and independence of neighbours and order."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine_service.decoding import reveal as device_half
from engine_service.decoding import settle
from engine_service.decoding.block_diffusion import BlockDiffusion
from tests.equivalence.harness import BLOCK, Setup, ToyEngine
from tests.equivalence.references import (
    DRAWING,
    GREEDY_RULES,
    RULES,
    random_knobs,
    random_prompt,
    reference_block,
)
from tests.equivalence.rule_reference import DREAM
from tests.fakes import MASK, ToyModel

SIZE = 8
STATIC = {"remasking": "low_confidence", "steps": SIZE}


def unsure_model(seed: int) -> ToyModel:
    """No probability of it rounds to 1, no entropy to 0."""
    model = ToyModel(seed)
    model.head *= 0.5
    return model


def answers(model: ToyModel, prompts: list[list[int]], knobs: dict[str, Any]) -> list[list[int]]:
    """What the engine says to each prompt in 16 tokens."""
    engine = ToyEngine(model, Setup(block=SIZE, max_rows=len(prompts)))
    keys = [engine.submit(prompt, 16, BLOCK, knobs, seed=7) for prompt in prompts]
    engine.run()
    return [engine.results[key].tokens for key in keys]


def steps_taken(model: ToyModel, prompt: list[int], knobs: dict[str, Any]) -> int:
    """Decisions for two whole blocks behind a prompt that ends on a border."""
    engine = ToyEngine(model, Setup(block=SIZE))
    key = engine.submit(prompt, 16, BLOCK, knobs, seed=7)
    engine.run()
    return engine.results[key].finish.usage.denoise_steps


ONE_BY_ONE = [
    {"remasking": "threshold", "threshold": 1.5},
    {"remasking": "factor", "factor": 0.0},
    {"remasking": "adaptive", "max_parallel": 1},
    {"remasking": "hierarchical", "threshold": 1.5, "low_threshold": 1.5},
    {"remasking": "low_confidence_dynamic", "threshold": 1.5, "steps": SIZE},
    {"remasking": "low_confidence_static", "steps": SIZE},
]
AT_ONCE = [
    {"remasking": "threshold", "threshold": 0.0},
    {"remasking": "factor", "factor": 100.0},
    {"remasking": "prefix", "threshold": 0.0},
    {"remasking": "hierarchical", "threshold": 0.0, "low_threshold": 0.0},
    {"remasking": "entropy_bound", "entropy_bound": 1000.0},
    *({"remasking": name, "steps": 1} for name in ("sequential", "random", *DREAM)),
]


@pytest.mark.parametrize("knobs", ONE_BY_ONE, ids=lambda knobs: knobs["remasking"])
def test_a_rule_at_its_careful_end_is_one_surest_position_per_step(knobs: dict, seed: int) -> None:
    rng, model = random.Random(seed), unsure_model(seed)
    prompts = [random_prompt(rng, 1, 12) for _ in range(4)]
    assert answers(model, prompts, knobs) == answers(model, prompts, STATIC)
    assert steps_taken(model, [1] * SIZE, knobs) == 16


@pytest.mark.parametrize("knobs", AT_ONCE, ids=lambda knobs: knobs["remasking"])
def test_a_rule_at_its_bold_end_is_one_argmax_per_block(knobs: dict, seed: int) -> None:
    rng, model = random.Random(seed), ToyModel(seed)
    prompts = [random_prompt(rng, 1, 12) for _ in range(4)]
    one_step = {"remasking": "low_confidence", "steps": 1}
    assert answers(model, prompts, knobs) == answers(model, prompts, one_step)
    assert steps_taken(model, [1] * SIZE, knobs) == 2


def test_an_entropy_bound_of_zero_is_the_lowest_entropy_first(seed: int) -> None:
    """Against a loop of its own, which knows nothing of any rule."""
    rng, model = random.Random(seed), unsure_model(seed)
    prompts = [random_prompt(rng, 1, 12) for _ in range(4)]
    got = answers(model, prompts, {"remasking": "entropy_bound", "entropy_bound": 0.0})
    for prompt, tokens in zip(prompts, got, strict=True):
        whole = list(prompt)
        while len(whole) < len(prompt) + 16:
            hidden = list(range(len(whole), (len(whole) // SIZE + 1) * SIZE))
            whole += [MASK] * len(hidden)
            while hidden:
                logits = model.dense(whole, SIZE)
                logits[:, MASK] = -torch.inf
                surprise = torch.distributions.Categorical(logits=logits[hidden]).entropy()
                place = hidden.pop(int(surprise.argmin()))
                whole[place] = int(logits[place].argmax())
        assert tokens == whole[len(prompt) : len(prompt) + 16]


def test_control_the_ends_are_told_apart() -> None:
    rng, model = random.Random(0), ToyModel(0)
    prompts = [random_prompt(rng, 1, 12) for _ in range(6)]
    said = [
        answers(model, prompts, knobs)
        for knobs in (STATIC, AT_ONCE[0], {"remasking": "entropy_bound", "entropy_bound": 0.0})
    ]
    assert said[0] != said[1] != said[2] != said[0]


@pytest.mark.parametrize("name", DRAWING)
def test_rules_that_draw_depend_on_the_seed_alone(name: str, seed: int) -> None:
    rng, model = random.Random(seed), ToyModel(seed)
    engine = ToyEngine(model, Setup(block=SIZE, max_rows=3))
    asked = {}
    for number in range(6):
        prompt, knobs = random_prompt(rng, 1, 12), random_knobs(rng, SIZE, (name,))
        asked[engine.submit(prompt, 20, BLOCK, knobs, seed=number)] = (prompt, knobs, number)
    while engine.scheduler.has_work:
        engine.step()
        if rng.random() < 0.3:
            engine.preempt(rng.choice(list(asked)))
    for key, (prompt, knobs, number) in asked.items():
        expected = reference_block(model, prompt, 20, SIZE, knobs, seed=number)
        assert engine.results[key].tokens == expected


def crowd(seed: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Tokens of seeded requests, a rule each, in a crowded engine and alone; and preemptions."""
    rng, model = random.Random(seed), ToyModel(seed)
    asked = []
    for number, rule in enumerate(rng.sample(RULES, 8)):
        options = {"temperature": rng.choice([0.0, 0.7, 1.5]), "seed": number}
        knobs = random_knobs(rng, 4, (rule,))
        asked.append((random_prompt(rng, 1, 17), rng.randint(4, 20), knobs, options))
    engine = ToyEngine(model, Setup(num_pages=16, max_rows=5, token_budget=21, logit_budget=13))
    keys: dict[int, int] = {}
    for index in rng.sample(range(8), 8):
        prompt, count, knobs, options = asked[index]
        keys[index] = engine.submit(prompt, count, BLOCK, knobs, **options)
    while engine.scheduler.has_work:
        engine.step()
        if rng.random() < 0.2:
            engine.preempt(rng.choice(list(keys.values())))
    engine.check_empty()
    together = [engine.results[keys[index]] for index in range(8)]
    apart = []
    for prompt, count, knobs, options in asked:
        alone = ToyEngine(model, Setup(page_size=8, max_rows=1, prefix_caching=False))
        key = alone.submit(prompt, count, BLOCK, knobs, **options)
        alone.run()
        apart.append(alone.results[key].tokens)
    preemptions = sum(result.finish.usage.preemptions for result in together)
    return [result.tokens for result in together], apart, preemptions


def test_batched_is_alone_whatever_rules_are_mixed(seed: int) -> None:
    preemptions = 0
    for round_seed in range(seed, seed + 4):
        together, apart, count = crowd(round_seed)
        assert together == apart
        preemptions += count
    assert preemptions > 0


def test_control_draws_by_the_place_in_the_batch_are_noticed() -> None:
    def by_place(keys: torch.Tensor, _: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (torch.arange(len(keys), dtype=dtype) * 0.618 + 0.1 * len(keys)).frac()[:, None]

    with patch.object(settle, "uniform", by_place):
        crowds = [crowd(number)[:2] for number in (3, 4)]
    assert any(together != apart for together, apart in crowds)


def adaptive_answers(seed: int, *, preempts: float) -> list[list[int]]:
    """Adaptive rows of a model that is seldom sure, preempted with that chance after each step."""
    rng, model, dice = random.Random(seed), ToyModel(seed), random.Random(seed)
    model.head *= 0.25
    engine = ToyEngine(model, Setup(block=16, max_rows=2))
    knobs = {"remasking": "adaptive", "max_parallel": SIZE}
    keys = [engine.submit(random_prompt(rng, 1, 12), 16, BLOCK, knobs) for _ in range(3)]
    while engine.scheduler.has_work:
        engine.step()
        if dice.random() < preempts:
            engine.preempt(dice.choice(keys))
    return [engine.results[key].tokens for key in keys]


def wrong_after_preemption() -> int:
    """Engines of which some answer depends on preemptions."""
    return sum(
        adaptive_answers(number, preempts=0.5) != adaptive_answers(number, preempts=0.0)
        for number in range(2)
    )


def test_an_adaptive_block_starts_anew_after_a_preemption() -> None:
    assert wrong_after_preemption() == 0


def test_control_an_adaptive_block_cannot_be_taken_up_half_way() -> None:
    """A row that is taken again does not know the threshold that the block had come to."""
    real = device_half.RevealTables.admit

    def forget(self: Any, rows: list[int], *args: Any, **kwargs: Any) -> None:
        real(self, rows, *args, **kwargs)
        self._state.rows.adapted[rows] = 0.9

    with (
        patch.object(device_half.RevealTables, "admit", forget),
        patch.object(BlockDiffusion, "restart", lambda _, v: (v.committed_len, v.canvas)),
        patch.object(device_half, "remembers", lambda knobs: False),
    ):
        assert wrong_after_preemption() > 0


@pytest.mark.parametrize("name", GREEDY_RULES)
def test_every_rule_equals_the_reference(name: str, seed: int) -> None:
    rng, model = random.Random(seed), ToyModel(seed)
    engine = ToyEngine(model, Setup(block=SIZE, token_budget=40))
    asked = {}
    for _ in range(3):
        prompt, knobs = random_prompt(rng, 1, 12), random_knobs(rng, SIZE, (name,))
        asked[engine.submit(prompt, 20, BLOCK, knobs, seed=seed)] = (prompt, knobs)
    engine.run()
    for key, (prompt, knobs) in asked.items():
        wanted = reference_block(model, prompt, 20, SIZE, knobs, seed=seed)
        assert engine.results[key].tokens == wanted


@pytest.mark.parametrize("name", ["threshold", "low_confidence_dynamic", "adaptive"])
def test_rules_by_the_kernel_equal_the_reference(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine; number for number they are compared in tests/kernels/test_reveal.py."""
    monkeypatch.setattr(settle, "runs_triton", lambda _: True)
    test_every_rule_equals_the_reference(name, seed)
