"""Blocks are taken to be open still while decisions are on the way: nothing but time changes."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

from engine_service.core.step import Span
from engine_service.core.strategy import View
from engine_service.decoding.block_diffusion import BlockDiffusion
from tests.equivalence.harness import AR, BLOCK, Result, Setup, ToyEngine
from tests.equivalence.references import RULES, random_knobs, random_prompt
from tests.fakes import ToyModel

SIZE = 8
NEVER = 1 << 30


def run(which: int, foreseen_tokens: int, *, overlaps: bool = True) -> ToyEngine:
    """Ten requests of all kinds of rules beside autoregressive ones; the same for a number."""
    rng = random.Random(which)
    setup = Setup(
        page_size=4,
        block=SIZE,
        num_pages=60,
        max_rows=6,
        logit_budget=48,
        overlaps=overlaps,
        foreseen_tokens=foreseen_tokens,
    )
    engine = ToyEngine(ToyModel(which), setup)
    for index in range(10):
        prompt, length = random_prompt(rng, 1, 18), rng.randint(1, 30)
        if index % 5 == 4:
            engine.submit(prompt, length, AR)
            continue
        knobs = random_knobs(rng, SIZE, RULES)
        if rng.random() < 0.3:
            knobs = {"threshold": 0.5, "edit_threshold": rng.choice([0.0, 0.1, 0.4])}
        options = {"seed": index + 1, "ignore_eos": rng.random() < 0.5}
        options["temperature"] = rng.choice([0.0, 0.9])
        options["logprobs"] = rng.choice([None, 2])
        options["emit_canvas"] = rng.random() < 0.5
        if length > 10 and rng.random() < 0.5:
            options["pinned"] = ((len(prompt) + rng.randint(0, 9), 3),)
        engine.submit(prompt, length, BLOCK, knobs, **options)
    engine.run()
    return engine


def told(result: Result) -> tuple[object, ...]:
    """Everything that a caller gets but the number of forward passes."""
    finish = result.finish
    usage = finish.usage._replace(forward_passes=0)
    shown = [(at, canvas.token_ids, canvas.fixed, canvas.step) for at, canvas in result.canvases]
    scores = [(one.token_ids, one.rank) if one else None for one in result.logprobs]
    return result.tokens, finish.reason, usage, shown, scores


@pytest.mark.parametrize("foreseen_tokens", [0, 2 * SIZE])
def test_what_is_told_is_the_same(seed: int, foreseen_tokens: int) -> None:
    for which in range(seed, seed + 6):
        plain = run(which, NEVER, overlaps=False)
        ahead = run(which, foreseen_tokens)
        for key, result in plain.results.items():
            assert told(ahead.results[key]) == told(result), (which, key)


def alone(foreseen_tokens: int) -> ToyEngine:
    engine = ToyEngine(
        ToyModel(3), Setup(block=SIZE, overlaps=True, foreseen_tokens=foreseen_tokens)
    )
    knobs = {"remasking": "low_confidence", "steps": SIZE}
    engine.submit(list(range(2, 2 + SIZE)), 3 * SIZE, BLOCK, knobs)
    engine.run()
    return engine


def test_no_step_is_sat_out() -> None:
    """Eight decisions a block, one pass that stores it, and one step in vain behind the end."""
    engine = alone(0)
    usage = engine.results[1].finish.usage
    assert usage.denoise_steps == 3 * SIZE
    assert len(engine.plans) == 3 * SIZE + 2 + 1, "decisions, two that store, one in vain"
    assert all(plan.num_spans == 1 for plan in engine.plans)


def test_control_without_foresight_blocks_store_with_the_next_one() -> None:
    engine = alone(NEVER)
    assert engine.results[1].finish.usage.denoise_steps == 3 * SIZE
    assert len(engine.plans) == 3 * SIZE
    sizes = [span.num_tokens for plan in engine.plans for span in plan.spans]
    assert max(sizes) == 2 * SIZE, "the first span of a block covers the one before"


def test_control_keys_taken_for_final_too_early_show() -> None:
    def hasty(self: BlockDiffusion, view: View, span: Span) -> View | None:
        """Takes the next block for open as soon as half of this one is committed."""
        return view._replace(num_cached=view.committed_len - view.committed_len % SIZE + SIZE // 2)

    wrong = 0
    for which in range(4):
        plain = run(which, NEVER, overlaps=False)
        with patch.object(BlockDiffusion, "foresee", hasty):
            try:
                ahead = run(which, 0)
            except (AssertionError, IndexError):
                wrong += 1
                continue
        wrong += any(told(ahead.results[k]) != told(r) for k, r in plain.results.items())
    assert wrong
