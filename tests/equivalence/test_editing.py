"""T2T editing against a dense loop written down from its definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine_service.core.step import FULL
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.decoding.full_canvas import FullCanvas
from tests.equivalence.harness import BLOCK, Setup, ToyEngine
from tests.equivalence.references import random_prompt
from tests.fakes import MASK, ToyModel
from tidemill.runtime.errors import InvalidRequest

SIZE = 6
ROOMY = Setup(block=SIZE, page_size=6, token_budget=256, logit_budget=256)


class Uncertain(ToyModel):
    """Half as peaked, so that tokens are revealed that the next step would not choose."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.head /= 2


def edited(
    model: ToyModel, tokens: list[int], stop: int, see: int, knobs: dict[str, Any]
) -> tuple[list[int], int]:
    """`tokens` with a block of masks up to `stop` filled and edited, and the steps that it took."""
    start, steps, post = len(tokens), 0, 0
    total = knobs.get("total", stop)
    tokens = tokens + [MASK] * (total - start)
    masked = set(range(start, stop))
    while True:
        logits = model.dense(tokens, see)
        logits[:, MASK] = -torch.inf
        best = {p: int(logits[p].argmax()) for p in range(start, stop)}
        sure = {p: float(logits[p].softmax(-1)[best[p]]) for p in best}
        filled = {p for p in masked if sure[p] >= knobs["threshold"]}
        if masked and not filled:
            filled = {max(masked, key=lambda p: (sure[p], -p))}
        replaced = {
            p
            for p in best
            if p not in masked and best[p] != tokens[p] and sure[p] > knobs["edit_threshold"]
        }
        post = 0 if masked else post + 1
        for p in filled | replaced:
            tokens[p] = best[p]
        masked -= filled
        steps += 1
        still = not filled and not replaced
        if not masked and (still or post >= knobs.get("max_post_edit_steps", 16)):
            return tokens[:stop], steps


def draw(rng: random.Random) -> dict[str, Any]:
    knobs = {"threshold": rng.choice([0.0, 0.2, 0.5, 1.5])}
    knobs["edit_threshold"] = rng.choice([0.0, 0.1, 0.4])
    if rng.random() < 0.5:
        knobs["max_post_edit_steps"] = rng.choice([0, 1, 3])
    return knobs


def by_blocks(
    model: ToyModel, prompt: list[int], count: int, knobs: dict[str, Any]
) -> tuple[list[int], int]:
    tokens, steps = list(prompt), 0
    while len(tokens) - len(prompt) < count:
        stop = (len(tokens) // SIZE + 1) * SIZE
        tokens, more = edited(model, tokens, stop, SIZE, knobs)
        steps += more
    return tokens[len(prompt) : len(prompt) + count], steps


def test_blocks_are_edited_until_nothing_changes() -> None:
    num_edited = 0
    for seed in range(8):
        rng, model = random.Random(seed), Uncertain(seed)
        engine, asked = ToyEngine(model, ROOMY), {}
        for _ in range(4):
            prompt, knobs = random_prompt(rng, 1, 9), draw(rng)
            asked[engine.submit(prompt, 15, BLOCK, knobs)] = (prompt, knobs)
        plain = engine.submit([1, 2, 3], 15, BLOCK, {"threshold": 0.5})
        engine.run()
        for key, (prompt, knobs) in asked.items():
            tokens, steps = by_blocks(model, prompt, 15, knobs)
            assert engine.results[key].tokens == tokens
            assert engine.results[key].finish.usage.denoise_steps == steps
            never = {**knobs, "edit_threshold": 1.0, "max_post_edit_steps": 0}
            num_edited += by_blocks(model, prompt, 15, never)[0] != tokens
        alone = ToyEngine(model, ROOMY)
        only = alone.submit([1, 2, 3], 15, BLOCK, {"threshold": 0.5})
        alone.run()
        assert engine.results[plain].tokens == alone.results[only].tokens
    assert num_edited > 3, "the control: editing changes answers"


def test_a_full_canvas_is_edited_block_by_block() -> None:
    for seed in range(6):
        rng, model = random.Random(seed), Uncertain(seed)
        strategy = FullCanvas(mask_token_id=MASK, logits_shift=0)
        engine = ToyEngine(
            model, ROOMY, strategies={"full_canvas": strategy}, default_method="full_canvas"
        )
        prompt, knobs = random_prompt(rng, 1, 9), draw(rng)
        key = engine.submit(prompt, 12, "full_canvas", {**knobs, "block_length": SIZE})
        engine.run()
        tokens = prompt
        for stop in (len(prompt) + SIZE, len(prompt) + 2 * SIZE):
            sizes = {**knobs, "total": len(prompt) + 12}
            tokens, _ = edited(model, tokens, stop, FULL, sizes)
        assert engine.results[key].tokens == tokens[len(prompt) :]


def test_nothing_of_a_block_is_told_before_it_is_done() -> None:
    """Also under preemption, which starts a block anew."""
    for seed in range(6):
        rng, model = random.Random(seed), Uncertain(seed)
        engine, asked = ToyEngine(model, ROOMY), {}
        for _ in range(4):
            prompt, knobs = random_prompt(rng, 1, 9), draw(rng)
            key = engine.submit(prompt, 15, BLOCK, knobs, emit_canvas=True, logprobs=0)
            asked[key] = (prompt, knobs)
        while engine.scheduler.has_work:
            engine.step()
            for result in engine.results.values():
                told = len(result.prompt) + len(result.tokens)
                assert not result.tokens or result.finishes or told % SIZE == 0
            if rng.random() < 0.2:
                engine.preempt(rng.choice(list(asked)))
        engine.check_empty()
        for key, (prompt, knobs) in asked.items():
            result = engine.results[key]
            assert result.tokens == by_blocks(model, prompt, 15, knobs)[0]
            assert not any(any(canvas.fixed) for _, canvas in result.canvases)
            for token, entry in zip(result.tokens, result.logprobs, strict=True):
                assert entry is not None
                assert entry.token_ids[0] == token
                assert entry.logprobs[0] > -50


@pytest.mark.parametrize(
    ("knobs", "param"),
    [
        ({"edit_threshold": -0.1}, "edit_threshold"),
        ({"edit_threshold": 1.1}, "edit_threshold"),
        ({"edit_threshold": 0.5, "max_post_edit_steps": -1}, "max_post_edit_steps"),
        ({"edit_threshold": 0.5, "max_post_edit_steps": 1.5}, "max_post_edit_steps"),
        ({"max_post_edit_steps": 4}, "max_post_edit_steps"),
    ],
)
def test_wrong_knobs_are_refused_by_name(knobs: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BlockDiffusion(block=4, mask_token_id=MASK).parse(knobs)
    assert refused.value.param == f"decoding.params.{param}"
