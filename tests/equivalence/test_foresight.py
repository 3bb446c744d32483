"""Steps are planned while decisions are on the way, from what the rule says of them or from what is
assumed: nothing but time changes."""

from __future__ import annotations

import random
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from engine_service.core.step import Span
from engine_service.core.strategy import DecodeStrategy, View
from engine_service.decoding import full_canvas
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.decoding.full_canvas import FullCanvas
from engine_service.decoding.pace import left_open
from engine_service.decoding.reveal_knobs import RevealKnobs
from tests.equivalence.harness import AR, BLOCK, Result, Setup, ToyEngine
from tests.equivalence.references import RULES, random_knobs, random_prompt
from tests.fakes import MASK, ToyModel

SIZE = 8
NEVER = 1 << 30
FULL = "full_canvas"


def run(which: int, foreseen_tokens: int, *, overlaps: bool = True) -> ToyEngine:
    """Ten requests of all kinds of rules beside autoregressive ones; the same for a number."""
    rng = random.Random(which)
    setup = Setup(
        page_size=4,
        block=SIZE,
        num_pages=90,
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


@cache
def plain_run(which: int) -> dict[int, Result]:
    """What everything is held to: every step is planned when the one ahead has been collected."""
    return run(which, NEVER, overlaps=False).results


@pytest.mark.parametrize("foreseen_tokens", [0, 2 * SIZE])
def test_what_is_told_is_the_same(seed: int, foreseen_tokens: int) -> None:
    for which in range(seed, seed + 6):
        ahead = run(which, foreseen_tokens)
        for key, result in plain_run(which).items():
            assert told(ahead.results[key]) == told(result), (which, key)


ASSUMED = {"remasking": "threshold", "threshold": 1.0}
"""One position a step, but for one that is as sure as can be."""
KNOWN = {"remasking": "low_confidence", "steps": SIZE}


def turns(engine: ToyEngine) -> int:
    """Until everything is answered; the last one only collects."""
    count = 0
    while engine.scheduler.has_work:
        engine.step()
        count += 1
    engine.check_empty()
    return count


def alone(foreseen_tokens: int, knobs: dict[str, Any]) -> tuple[ToyEngine, int]:
    """Three blocks of one request; and how many turns launched nothing."""
    engine = ToyEngine(
        ToyModel(3), Setup(block=SIZE, overlaps=True, foreseen_tokens=foreseen_tokens)
    )
    engine.submit(list(range(2, 2 + SIZE)), 3 * SIZE, BLOCK, knobs)
    num_turns = turns(engine)
    assert engine.results[1].finish.usage.denoise_steps == 3 * SIZE
    assert all(plan.num_spans == 1 for plan in engine.plans)
    return engine, num_turns - len(engine.plans)


def sizes(engine: ToyEngine) -> list[int]:
    return [span.num_tokens for plan in engine.plans for span in plan.spans]


def test_what_a_rule_says_is_planned_ahead() -> None:
    """No step is sat out, none in vain; a block is stored by the next one's first span."""
    engine, num_still = alone(NEVER, KNOWN)
    assert len(engine.plans) == 3 * SIZE
    assert num_still == 1, "the last turn collects"
    assert sizes(engine).count(2 * SIZE) == 3, "the prompt with the first block, and two blocks"


@pytest.mark.parametrize("name", ["assumed", "known"])
def test_what_is_assumed_costs_a_step_in_vain(name: str) -> None:
    """Eight decisions a block, one pass that stores it, and one step in vain behind the end; in
    steps of many tokens also where the rule says when a block is full."""
    engine, num_still = alone(0, {"assumed": ASSUMED, "known": KNOWN}[name])
    assert len(engine.plans) == 3 * SIZE + 2 + 1
    assert num_still == 1, "the last turn collects"


def test_control_without_foresight_every_other_step_is_sat_out() -> None:
    engine, num_still = alone(NEVER, ASSUMED)
    assert len(engine.plans) == num_still == 3 * SIZE
    assert max(sizes(engine)) == 2 * SIZE, "the first span of a block covers the one before"


def test_control_keys_taken_for_final_too_early_show() -> None:
    def hasty(self: BlockDiffusion, view: View, span: Span, *, may_err: bool) -> View | None:
        """Takes the next block for open as soon as half of this one is committed."""
        return view._replace(num_cached=view.committed_len - view.committed_len % SIZE + SIZE // 2)

    def shows(which: int) -> bool:
        with patch.object(BlockDiffusion, "foresee", hasty):
            try:
                ahead = run(which, 0)
            except (AssertionError, IndexError):
                return True
        return any(told(ahead.results[k]) != told(r) for k, r in plain_run(which).items())

    assert any(map(shows, range(4)))


def canvases(which: int, *, overlaps: bool, foreseen_tokens: int = NEVER) -> ToyEngine:
    """Eight whole canvases of all kinds of rules and caches; the same for a number."""
    rng, shift = random.Random(which), which % 2
    setup = Setup(
        num_pages=90,
        max_rows=5,
        token_budget=160,
        logit_budget=rng.choice([24, 160]),
        canvas_budget=rng.choice([24, 160]),
        overlaps=overlaps,
        foreseen_tokens=foreseen_tokens,
    )
    strategy = FullCanvas(mask_token_id=MASK, logits_shift=shift)
    strategies: dict[str, DecodeStrategy] = {FULL: strategy}
    engine = ToyEngine(
        ToyModel(which), setup, strategies=strategies, default_method=FULL, shifts={FULL: shift}
    )
    for index in range(8):
        prompt, block = random_prompt(rng, 1, 9), rng.randint(2, SIZE)
        num_blocks = rng.randint(1, 3)
        length = block * num_blocks - (rng.randrange(block) if num_blocks > 1 else 0)
        knobs = random_knobs(rng, block, RULES) | {"block_length": block}
        pinned = rng.randrange(length) if rng.random() < 0.5 else None
        gap = length - (pinned == length - 1)
        if "steps" in knobs:
            knobs["steps"] *= -(-gap // block)
        knobs["cache"] = rng.choice(["none", "prefix", "dual"])
        if knobs["cache"] != "none" and rng.random() < 0.5:
            knobs["refresh_interval"] = rng.randint(1, 4)
        options = {"seed": index + 1, "ignore_eos": rng.random() < 0.5}
        options["temperature"] = rng.choice([0.0, 0.9])
        options["logprobs"], options["min_tokens"] = rng.choice([None, 2]), rng.randint(0, length)
        options["emit_canvas"] = rng.random() < 0.5
        if pinned is not None:
            options["pinned"] = ((len(prompt) + pinned, 3),)
        engine.submit(prompt, length, FULL, knobs, **options)
    engine.run()
    return engine


@cache
def plain_canvases(which: int) -> dict[int, Result]:
    return canvases(which, overlaps=False).results


def num_differing(which: int, foreseen_tokens: int = NEVER) -> int:
    plain = plain_canvases(which)
    ahead = canvases(which, overlaps=True, foreseen_tokens=foreseen_tokens)
    return sum(told(ahead.results[key]) != told(one) for key, one in plain.items())


@pytest.mark.parametrize("foreseen_tokens", [0, NEVER])
def test_canvases_are_told_the_same(seed: int, foreseen_tokens: int) -> None:
    assert not sum(num_differing(which, foreseen_tokens) for which in range(seed, seed + 8))


def test_control_a_block_taken_for_done_too_early_shows() -> None:
    def hasty(knobs: RevealKnobs, num_open: int, *, step: int, steps: int) -> int | None:
        left = left_open(knobs, num_open, step=step, steps=steps)
        return left and left - 1

    def shows(which: int) -> bool:
        plain_canvases(which)  # as it ships
        with patch.object(full_canvas, "left_open", hasty):
            try:
                return num_differing(which) > 0
            except (AssertionError, IndexError):
                return True

    assert any(map(shows, range(4)))


@pytest.mark.parametrize(
    ("cache", "steps", "num_tokens"),
    [("none", 24, 26 * 24), ("dual", 24, 3 * 26 + 21 * 8), ("prefix", 6, 3 * 26 + 24 + 16 + 8)],
)
def test_canvases_are_planned_ahead(cache: str, steps: int, num_tokens: int) -> None:
    """Step behind step, none in vain: what is computed is what it was."""
    engine = ToyEngine(
        ToyModel(1),
        Setup(token_budget=256, logit_budget=256, overlaps=True),
        strategies={FULL: FullCanvas(mask_token_id=MASK, logits_shift=0)},
        default_method=FULL,
    )
    knobs = {"cache": cache, "block_length": SIZE, "steps": steps}
    engine.submit([1, 2], 24, FULL, knobs)
    assert turns(engine) == len(engine.plans) + 1 == steps + 1
    assert sum(sizes(engine)) == num_tokens
