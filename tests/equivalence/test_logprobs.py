"""Log-probabilities of chosen tokens and of prompts equal those of one dense forward."""

from __future__ import annotations

import random

import pytest

from tests.equivalence.harness import AR, BLOCK, Setup, ToyEngine
from tests.equivalence.references import random_prompt
from tests.fakes import MASK, ToyModel


def test_chosen_tokens_are_scored_with_raw_logits(seed: int) -> None:
    rng, model = random.Random(seed), ToyModel(seed)
    engine = ToyEngine(model, Setup())
    prompt = random_prompt(rng, 3, 9)
    key = engine.submit(prompt, 9, AR, logprobs=2, temperature=1.3, seed=1, presence_penalty=1.0)
    engine.run()
    result = engine.results[key]
    logits = model.dense(prompt + result.tokens, 1)[len(prompt) - 1 : -1]
    logits[:, MASK] = -float("inf")
    scores = logits.log_softmax(-1)
    for token, row, entry in zip(result.tokens, scores, result.logprobs, strict=True):
        assert entry is not None
        best = row.topk(2)
        assert entry.token_ids == (token, *best.indices.tolist())
        assert entry.logprobs == pytest.approx([float(row[token]), *best.values.tolist()], abs=1e-5)
        assert entry.rank == 1 + int((row > row[token]).sum())


def test_diffusion_scores_a_token_when_it_is_revealed() -> None:
    """One position per step from the left: each is scored with masks behind it."""
    model, prompt = ToyModel(8), [1, 2, 3, 4]
    engine = ToyEngine(model, Setup(block=4))
    knobs = {"remasking": "sequential", "steps": 4}
    key = engine.submit(prompt, 4, BLOCK, knobs, logprobs=0)
    engine.run()
    result = engine.results[key]
    for index, (token, entry) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        seen = [*prompt, *result.tokens[:index], *[MASK] * (4 - index)]
        logits = model.dense(seen, 4)[4 + index]
        logits[MASK] = -float("inf")
        assert entry is not None
        assert entry.token_ids == (token,)
        assert entry.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)


def test_prompt_logprobs_cover_the_prompt_once_whatever_the_chunks(seed: int) -> None:
    rng = random.Random(seed)
    model = ToyModel(seed)
    for token_budget, logit_budget, preempts in ((64, 64, False), (5, 3, True), (3, 1, True)):
        engine = ToyEngine(model, Setup(token_budget=token_budget, logit_budget=logit_budget))
        prompts = [random_prompt(rng, 1, 20) for _ in range(3)] + [[5] * 9, [5] * 9]
        keys = [engine.submit(prompt, 3, AR, prompt_logprobs=1) for prompt in prompts]
        while engine.scheduler.has_work:
            engine.step()
            if preempts and rng.random() < 0.2:
                engine.preempt(rng.choice(keys))
        engine.check_empty()
        for key, prompt in zip(keys, prompts, strict=True):
            entries = engine.results[key].prompt_logprobs
            assert [position for position, _ in entries] == list(range(1, len(prompt)))
            scores = model.dense(prompt, 1).log_softmax(-1)
            for position, entry in entries:
                row = scores[position - 1]
                assert entry.token_ids == (prompt[position], int(row.argmax()))
                assert entry.logprobs[0] == pytest.approx(float(row[prompt[position]]), abs=1e-5)
            assert engine.results[key].finish.usage.cached_tokens == 0
