"""engine(method) == slow cache-free reference, whatever sizes, order, sharing and preemption do."""

from __future__ import annotations

import math
import random

import pytest

from engine_service.core.messages import FinishReason
from tests.equivalence.harness import AR, BLOCK, Setup, ToyEngine
from tests.equivalence.references import (
    random_knobs,
    random_prompt,
    reference_ar,
    reference_block,
    reference_shift0,
)
from tests.fakes import MASK, ToyModel

SIZES = [(4, 8), (2, 8), (8, 4), (4, 4), (3, 4), (4, 1), (16, 4), (6, 4)]
"""(page, block): smaller, equal, larger, and neither a divisor of the other."""


def tight(rng: random.Random, page_size: int, block: int, *, overlaps: bool) -> Setup:
    """A set-up in which something is always scarce; 56 tokens are the largest request."""
    unit = page_size * block
    return Setup(
        page_size=page_size,
        block=block,
        max_rows=rng.choice([1, 3, 6]),
        num_pages=-(-rng.choice([64, 80, 300]) // page_size) + unit // page_size,
        token_budget=rng.choice([8, 13, 64]),
        logit_budget=rng.choice([8, 16, 64]),
        prefix_caching=rng.random() < 0.8,
        overlaps=overlaps,
    )


def expected(model: ToyModel, engine: ToyEngine, asked: tuple) -> list[int]:
    """What the reference says of a request."""
    prompt, count, method, knobs = asked
    if method == AR:
        return reference_ar(model, prompt, count)
    return reference_block(model, prompt, count, engine.setup.block, knobs)


def play(engine: ToyEngine, rng: random.Random, num_requests: int = 8) -> dict[int, tuple]:
    """Random arrivals, shared prefixes, priorities and forced preemptions; runs to the end."""
    shared = random_prompt(rng, 0, 16)
    asked: dict[int, tuple] = {}
    while len(asked) < num_requests or engine.scheduler.has_work:
        while len(asked) < num_requests and rng.random() < 0.4:
            prompt = (shared if rng.random() < 0.7 else []) + random_prompt(rng, 1, 17)
            count, method = rng.randint(1, 22), rng.choice([AR, BLOCK])
            knobs = random_knobs(rng, engine.setup.block) if method == BLOCK else {}
            key = engine.submit(prompt, count, method, knobs, priority=rng.randint(0, 2))
            asked[key] = (prompt, count, method, knobs)
        engine.step()
        if rng.random() < 0.2:
            # Those that wait or are over cannot be preempted: the first that runs.
            any(engine.preempt(key) for key in rng.sample(list(asked), len(asked)))
    engine.check_empty()
    return asked


@pytest.mark.parametrize(("page_size", "block"), SIZES)
def test_every_request_gets_the_tokens_of_the_reference(
    page_size: int, block: int, seed: int
) -> None:
    preemptions = {False: 0, True: 0}
    for round_seed in range(seed, seed + 4):
        rng = random.Random(round_seed)
        model = ToyModel(round_seed)
        overlaps = round_seed % 2 == 1
        engine = ToyEngine(model, tight(rng, page_size, block, overlaps=overlaps))
        for key, asked in play(engine, rng).items():
            result = engine.results[key]
            assert result.tokens == expected(model, engine, asked), (round_seed, key, asked)
            assert result.finish.reason == FinishReason.LENGTH
            preemptions[overlaps] += result.finish.usage.preemptions
    assert all(preemptions.values()), f"preemptions by overlap: {preemptions}; force them in both"


def test_aborts_leave_the_others_alone(seed: int) -> None:
    for round_seed in range(seed, seed + 6):
        rng = random.Random(round_seed)
        model = ToyModel(round_seed)
        engine = ToyEngine(model, tight(rng, 4, 4, overlaps=round_seed % 2 == 1))
        asked: dict[int, tuple] = {}
        for _ in range(8):
            prompt, count = random_prompt(rng, 1, 17), rng.randint(4, 22)
            method = rng.choice([AR, BLOCK])
            asked[engine.submit(prompt, count, method)] = (prompt, count, method, {})
        victims = rng.sample(list(asked), 4)
        while engine.scheduler.has_work:
            engine.step()
            if victims and rng.random() < 0.3:
                engine.abort(victims.pop())
                engine.collect_output()
        engine.check_empty()
        for key, request in asked.items():
            result, whole = engine.results[key], expected(model, engine, request)
            assert result.tokens == whole[: len(result.tokens)]
            assert result.finish.usage.output_tokens == len(result.tokens)
            if result.finish.reason == FinishReason.LENGTH:
                assert result.tokens == whole
            else:
                assert result.finish.reason == FinishReason.ABORTED


def test_rule_e_a_literal_mask_id_in_a_prompt_is_an_ordinary_token() -> None:
    model = ToyModel(3)
    engine = ToyEngine(model, Setup())
    prompts = [[MASK] * n for n in (1, 3, 4, 6, 9)] + [[5, MASK, 6], [1, 2, 3, MASK]]
    asked = {}
    for prompt in prompts:
        for method in (AR, BLOCK):
            asked[engine.submit(prompt, 11, method)] = (prompt, 11, method, {})
    engine.run()
    for key, request in asked.items():
        assert engine.results[key].tokens == expected(model, engine, request), request


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rule_f_the_mask_token_is_never_chosen(temperature: float) -> None:
    model = ToyModel(4)
    model.head[MASK] = 50 * model.head[:MASK].mean(0)
    engine = ToyEngine(model, Setup())
    for key in range(6):
        options = {"temperature": temperature, "seed": key}
        engine.submit([key + 1, 2, 3], 16, BLOCK, {"threshold": 0.3}, **options)
        engine.submit([key + 1, 2, 3], 16, AR, **options)
    engine.run()
    assert all(MASK not in result.tokens for result in engine.results.values())


def test_block_one_is_greedy_autoregression_without_shift(seed: int) -> None:
    rng, model = random.Random(seed), ToyModel(seed)
    engine = ToyEngine(model, Setup(block=1))
    keys = [engine.submit(random_prompt(rng, 1, 12), 10, BLOCK) for _ in range(6)]
    engine.run()
    for key in keys:
        result = engine.results[key]
        assert result.tokens == reference_shift0(model, result.prompt, 10)
        assert result.finish.usage.forward_passes == 10


def test_thresholds_at_their_ends_are_one_step_and_one_token_per_step(seed: int) -> None:
    rng, model = random.Random(seed), ToyModel(seed)
    engine = ToyEngine(model, Setup(block=4))
    prompt = random_prompt(rng, 8, 8)
    all_at_once = engine.submit(prompt, 12, BLOCK, {"threshold": 0.0})
    one_by_one = engine.submit(prompt, 12, BLOCK, {"threshold": 1.5})
    static = engine.submit(prompt, 12, BLOCK, {"remasking": "low_confidence_static", "steps": 4})
    engine.run()
    passes = [engine.results[k].finish.usage.denoise_steps for k in (all_at_once, one_by_one)]
    assert passes == [3, 12]
    assert engine.results[one_by_one].tokens == engine.results[static].tokens


def test_a_finished_block_is_stored_by_the_next_blocks_first_span() -> None:
    """Forward passes = decisions: opening a block costs none, unless the budget is too small."""
    model = ToyModel(1)
    for budget, extra in ((64, 0), (4, 2)):
        engine = ToyEngine(model, Setup(block=4, token_budget=budget))
        key = engine.submit([1, 2, 3, 4], 12, BLOCK, {"threshold": 0.0})
        engine.run()
        usage = engine.results[key].finish.usage
        prompt_pass = 1 if budget == 4 else 0
        assert usage.denoise_steps == 3
        assert usage.forward_passes == 3 + extra + prompt_pass


def test_a_block_revealed_at_once_shows_the_next_one() -> None:
    """The canvas looks as it did before, but stands one block further."""
    engine = ToyEngine(ToyModel(0), Setup(block=4))
    key = engine.submit([1, 2, 3, 4], 12, BLOCK, {"threshold": 0.0}, emit_canvas=True)
    engine.run()
    shown = [(start, canvas.fixed) for start, canvas in engine.results[key].canvases]
    assert shown == [(8, (False,) * 4), (12, (False,) * 4)]


def test_a_watched_canvas_says_how_sure_each_token_is() -> None:
    """The probability in the step that revealed it, which its log-probability says too."""
    num_fixed, open_ones = 0, set()
    for seed in range(4):
        engine = ToyEngine(ToyModel(seed), Setup(block=8))
        for threshold in (0.3, 0.6, 1.5):
            knobs = {"threshold": threshold}
            engine.submit([1, 2, 3], 20, BLOCK, knobs, emit_canvas=True, logprobs=0)
        plain = engine.submit([4, 5], 20, BLOCK, {})
        while engine.scheduler.has_work:
            engine.step()
            for request in engine.scheduler._requests.values():
                assert (request.canvas.confidence is None) == (request.key == plain)
            engine.preempt(1 + seed % 3)
        for result in engine.results.values():
            for _, canvas in result.canvases:
                assert canvas.confidence is not None
                assert canvas.logprobs is None or len(canvas.logprobs) == len(canvas.confidence)
                scored = canvas.logprobs or [None] * len(canvas.fixed)
                for fixed, sure, entry in zip(canvas.fixed, canvas.confidence, scored, strict=True):
                    if fixed:
                        assert entry is not None
                        assert sure == pytest.approx(math.exp(entry.logprobs[0]), abs=1e-5)
                        num_fixed += 1
                    else:
                        open_ones.add(round(sure, 3))
    assert num_fixed > 50
    assert len(open_ones) > 50
    assert all(0 <= sure <= 1 for sure in open_ones)
