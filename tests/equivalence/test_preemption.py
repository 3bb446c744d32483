"""Preemption, chunking and batching change nothing: not tokens, not samples, not what streamed."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

from engine_service.core.planner import Planner
from engine_service.core.request import Request
from engine_service.core.step import Span, Update
from engine_service.decoding.block_diffusion import BlockDiffusion
from tests.equivalence.harness import AR, BLOCK, Result, Setup, ToyEngine
from tests.equivalence.references import random_knobs, random_prompt, reference_block
from tests.fakes import MASK, ToyModel


def wrong_after_preemptions(num_rounds: int) -> int:
    """Requests whose tokens differ from the reference when preempted every few steps."""
    num_wrong = 0
    for seed in range(num_rounds):
        rng, model = random.Random(seed), ToyModel(seed)
        engine = ToyEngine(model, Setup(block=8))
        asked = {}
        for _ in range(5):
            prompt, knobs = random_prompt(rng, 1, 12), random_knobs(rng, 8)
            asked[engine.submit(prompt, 20, BLOCK, knobs)] = (prompt, knobs)
        while engine.scheduler.has_work:
            engine.step()
            engine.preempt(rng.choice(list(asked)))
        for key, (prompt, knobs) in asked.items():
            reference = reference_block(model, prompt, 20, 8, knobs)
            num_wrong += engine.results[key].tokens != reference
    return num_wrong


def test_rule_d_a_preempted_block_goes_on_where_it_was() -> None:
    assert wrong_after_preemptions(8) == 0


def test_rule_d_control_restarting_a_block_contradicts_what_was_streamed() -> None:
    real = Planner._preempt

    def restart(self: Planner, request: Request) -> None:
        committed_len = len(request.committed)
        request.canvas = request.strategy.begin(committed_len, request.params, request.max_len)
        real(self, request)

    with patch.object(Planner, "_preempt", restart):
        assert wrong_after_preemptions(8) > 0


class ClaimsTooMuch(BlockDiffusion):
    """Pretends that a finished block's KV is final, though it was computed beside masks."""

    def settle(self, committed_len, canvas, span: Span, decision):  # type: ignore[no-untyped-def]
        update = super().settle(committed_len, canvas, span, decision)
        opened = update.canvas.token_ids == (MASK,) * self.mask_block
        is_full = decision is not None and opened and update.commit
        return Update(
            update.commit,
            update.logprobs,
            span.stop if is_full else update.num_cached,
            update.canvas,
        )


@pytest.mark.parametrize(("strategy", "is_right"), [(BlockDiffusion, True), (ClaimsTooMuch, False)])
def test_a_finished_blocks_kv_is_final_one_forward_later(
    strategy: type[BlockDiffusion], is_right: bool
) -> None:
    num_wrong = 0
    for seed in range(4):
        rng, model = random.Random(seed), ToyModel(seed)
        engine = ToyEngine(
            model,
            Setup(prefix_caching=False),
            strategies={BLOCK: strategy(block=4, mask_token_id=MASK)},
            default_method=BLOCK,
        )
        for _ in range(5):
            engine.submit(random_prompt(rng, 1, 17), 16, BLOCK, {"threshold": 0.6})
        engine.run()
        for result in engine.results.values():
            reference = reference_block(model, result.prompt, 16, 4, {"threshold": 0.6})
            num_wrong += result.tokens != reference
    assert (num_wrong == 0) == is_right, f"{num_wrong} of 20 requests are wrong"


def same(left: Result, right: Result) -> None:
    """Tokens equal, log-probabilities equal up to rounding."""
    assert left.tokens == right.tokens
    for mine, other in zip(left.logprobs, right.logprobs, strict=True):
        assert mine is not None
        assert other is not None
        assert mine.token_ids == other.token_ids
        assert mine.rank == other.rank
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_samples_depend_on_the_seed_alone(seed: int) -> None:
    """Alone in a roomy engine, or together in a tight one with preemptions and chunks."""
    preemptions = 0
    for round_seed in range(seed, seed + 3):
        rng, model = random.Random(round_seed), ToyModel(round_seed)
        asked = []
        for number in range(8):
            method = rng.choice([AR, BLOCK])
            options = {
                "temperature": rng.choice([0.7, 1.0, 2.0]),
                "top_p": rng.choice([None, 0.8]),
                "top_k": rng.choice([None, 5]),
                "seed": number,
                "choice": rng.randint(0, 2),
                "logprobs": rng.randint(0, 3),
                "logit_bias": {5: 2.0} if rng.random() < 0.3 else {},
                "min_tokens": rng.choice([0, 4]),
            }
            if method == AR:
                options["presence_penalty"] = rng.choice([0.0, 0.7])
                options["repetition_penalty"] = rng.choice([1.0, 1.3])
            knobs = random_knobs(rng, 4) if method == BLOCK else {}
            asked.append((random_prompt(rng, 1, 17), rng.randint(4, 20), method, knobs, options))
        tight = Setup(num_pages=16, max_rows=5, token_budget=9, logit_budget=9)
        crowded = ToyEngine(model, tight)
        order = list(range(len(asked)))
        rng.shuffle(order)
        keys = {}
        for index in order:
            prompt, count, method, knobs, options = asked[index]
            keys[index] = crowded.submit(prompt, count, method, knobs, **options)
        while crowded.scheduler.has_work:
            crowded.step()
            if rng.random() < 0.1:
                crowded.preempt(rng.choice(list(keys.values())))
        crowded.check_empty()
        for index, (prompt, count, method, knobs, options) in enumerate(asked):
            alone = ToyEngine(model, Setup(page_size=8, max_rows=1, prefix_caching=False))
            key = alone.submit(prompt, count, method, knobs, **options)
            alone.run()
            same(crowded.results[keys[index]], alone.results[key])
            preemptions += crowded.results[keys[index]].finish.usage.preemptions
    assert preemptions > 0


def test_another_seed_or_choice_gives_other_samples() -> None:
    engine = ToyEngine(ToyModel(0), Setup())
    for method in (AR, BLOCK):
        for given, choice in ((1, 0), (1, 0), (2, 0), (1, 1)):
            engine.submit([1, 2, 3], 16, method, temperature=6.0, seed=given, choice=choice)
    engine.run()
    tokens = [tuple(result.tokens) for result in engine.results.values()]
    for four in (tokens[:4], tokens[4:]):
        assert four[0] == four[1]
        assert len(set(four)) == 3


def test_unseeded_requests_differ_but_survive_preemption() -> None:
    engine = ToyEngine(ToyModel(0), Setup())
    keys = [engine.submit([1, 2, 3], 16, AR, temperature=6.0) for _ in range(3)]
    engine.run()
    assert len({tuple(engine.results[key].tokens) for key in keys}) == 3
