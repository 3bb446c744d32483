"""Full-canvas decoding against the authors' loops, and what must not change its tokens."""

from __future__ import annotations

import random
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine_service.core.step import FULL, Canvas
from engine_service.core.strategy import View
from engine_service.decoding.full_canvas import FullCanvas
from tests.equivalence.harness import EOS, Setup, ToyEngine
from tests.equivalence.oracles_dense import DenseToy
from tests.equivalence.oracles_dream import dream_sample
from tests.equivalence.oracles_fast_dllm import factor_rule, fast_dllm_generate, threshold_rule
from tests.equivalence.oracles_llada import llada_generate
from tests.equivalence.references import random_prompt
from tests.fakes import MASK, ToyModel
from tidemill.runtime.errors import InvalidRequest, ServiceError

NAME = "full_canvas"
ROOMY = Setup(token_budget=256, logit_budget=256)


def engine(model: ToyModel, setup: Setup = ROOMY, *, shift: int = 0) -> ToyEngine:
    """An engine whose model sees everything."""
    strategy = FullCanvas(mask_token_id=MASK, logits_shift=shift)
    return ToyEngine(
        model, setup, strategies={NAME: strategy}, default_method=NAME, shifts={NAME: shift}
    )


def test_fixed_steps_are_those_of_llada() -> None:
    for seed in range(6):
        rng, model = random.Random(seed), ToyModel(seed)
        ours, asked = engine(model), {}
        for _ in range(4):
            block = rng.choice([4, 8, 16])
            answer = block * rng.randint(1, 3)
            steps = rng.randint(1, block) * (answer // block)
            prompt = random_prompt(rng, 1, 12)
            knobs = {"remasking": "low_confidence", "steps": steps, "block_length": block}
            asked[ours.submit(prompt, answer, NAME, knobs)] = (prompt, answer, block, steps)
        ours.run()
        for key, (prompt, answer, block, steps) in asked.items():
            wanted = llada_generate(
                DenseToy(model).logits,
                prompt,
                mask_id=MASK,
                gen_length=answer,
                block_length=block,
                steps=steps,
            )
            result = ours.results[key]
            assert result.tokens == wanted.tokens
            assert result.finish.usage.forward_passes == wanted.nfe == steps


SCALES = {"never sure": 0.1, "seldom sure": 0.4, "often sure": 2.0}
"""Of a toy's logits."""


def scaled(seed: int, kind: str) -> ToyModel:
    """A model that is sure so often."""
    model = ToyModel(seed)
    model.head *= SCALES[kind]
    return model


def test_thresholds_fire_never_seldom_or_often() -> None:
    """What the comparisons below are worth: no, some or many steps reveal more than one token."""
    shares: dict[str, list[float]] = {kind: [] for kind in SCALES}
    for kind, seed in product(SCALES, range(2)):
        rng, dense = random.Random(seed), DenseToy(scaled(seed, kind))
        outcomes = [
            fast_dllm_generate(
                dense.cached,
                random_prompt(rng, 1, 12),
                mask_id=MASK,
                gen_length=24,
                block_length=8,
                rule=threshold_rule(threshold),
            )
            for threshold in (0.5, 0.9)
            for _ in range(4)
        ]
        num_parallel = sum(len(step) > 1 for one in outcomes for step in one.reveals)
        shares[kind].append(num_parallel / sum(one.nfe for one in outcomes))
    assert max(shares["never sure"]) == 0
    assert 0 < min(shares["seldom sure"]) <= max(shares["seldom sure"]) < 0.2
    assert min(shares["often sure"]) > 0.4


@pytest.mark.parametrize(
    ("cache", "refresh"),
    [("none", None), ("prefix", None), ("dual", None), ("prefix", 1), ("dual", 1), ("dual", 3)],
)
@pytest.mark.parametrize("shift", [0, 1], ids=["LLaDA", "Dream"])
@pytest.mark.parametrize("kind", SCALES)
def test_thresholds_and_caches_are_those_of_fast_dllm(
    kind: str, shift: int, cache: str, refresh: int | None
) -> None:
    num_forwards = set()
    for seed in (0, 2):  # one asks for 0.0, the other for 1.5, and both for what is between
        rng, model = random.Random(seed), scaled(seed, kind)
        ours, asked = engine(model, shift=shift), {}
        for threshold in (0.0, 0.5, 0.9, 1.5):
            prompt, factor = random_prompt(rng, 1, 12), rng.random() < 0.3
            rule = factor_rule(1.5) if factor else threshold_rule(threshold)
            knobs: dict[str, Any] = {"cache": cache, "block_length": 8}
            knobs |= (
                {"remasking": "factor", "factor": 1.5}
                if factor
                else {"remasking": "threshold", "threshold": threshold}
            )
            knobs |= {} if refresh is None else {"refresh_interval": refresh}
            asked[ours.submit(prompt, 24, NAME, knobs)] = (prompt, rule)
        ours.run()
        for key, (prompt, rule) in asked.items():
            wanted = fast_dllm_generate(
                DenseToy(model).cached,
                prompt,
                mask_id=MASK,
                gen_length=24,
                block_length=8,
                rule=rule,
                cache=cache,
                refresh_every=refresh,
                shift=shift,
            )
            assert ours.results[key].tokens == wanted.tokens
            assert ours.results[key].finish.usage.forward_passes == wanted.nfe
            num_forwards.add(wanted.nfe)
    assert min(num_forwards) == 3, "no threshold revealed whole blocks"
    assert max(num_forwards) == 24, "no threshold revealed one position at a time"


@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
def test_dreams_schedule_and_shift(alg: str) -> None:
    for seed in range(8):
        rng, model = random.Random(seed), ToyModel(seed)
        prompt, answer = random_prompt(rng, 1, 12), rng.randint(4, 20)
        steps = rng.randint(1, answer)
        ours = engine(model, shift=1)
        knobs = {"remasking": alg, "steps": steps, "block_length": answer}
        key = ours.submit(prompt, answer, NAME, knobs)
        ours.run()
        wanted = dream_sample(
            DenseToy(model).logits,
            prompt,
            mask_id=MASK,
            gen_length=answer,
            steps=steps,
            alg=alg,
        )
        assert ours.results[key].tokens == wanted.tokens


def wrong_when_crowded(cache: str, seed: int, *, shift: int = 0) -> int:
    """Requests whose tokens differ when they share a tight engine and are preempted."""
    rng, model = random.Random(seed), ToyModel(seed)
    asked = []
    for number in range(6):
        knobs: dict[str, Any] = {
            "remasking": rng.choice(["threshold", "low_confidence", "factor"]),
            "block_length": rng.choice([3, 4, 8]),
            "cache": cache,
        }
        if cache != "none" and rng.random() < 0.5:
            knobs["refresh_interval"] = rng.randint(1, 4)
        options = {"temperature": rng.choice([0.0, 1.0]), "seed": number, "logprobs": 1}
        asked.append((random_prompt(rng, 1, 12), rng.randint(8, 20), knobs, options))
    tight = Setup(num_pages=22, max_rows=4, token_budget=70, logit_budget=12)
    crowded = engine(model, tight, shift=shift)
    keys = [crowded.submit(*one[:2], NAME, one[2], **one[3]) for one in asked]
    while crowded.scheduler.has_work:
        crowded.step()
        if rng.random() < 0.3:
            crowded.preempt(rng.choice(keys))
    crowded.check_empty()
    num_wrong = 0
    for key, (prompt, count, knobs, options) in zip(keys, asked, strict=True):
        alone = engine(model, shift=shift)
        only = alone.submit(prompt, count, NAME, knobs, **options)
        alone.run()
        mine, other = crowded.results[key], alone.results[only]
        assert len(mine.tokens) == len(mine.logprobs) == count
        assert mine.finish.usage.output_tokens == count
        num_wrong += mine.tokens != other.tokens
    return num_wrong


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("shift", [0, 1])
def test_neighbours_and_preemption_change_nothing(cache: str, shift: int) -> None:
    assert sum(wrong_when_crowded(cache, seed, shift=shift) for seed in range(4)) == 0


def test_control_a_cached_block_that_goes_on_after_preemption_differs() -> None:
    def keep(self: FullCanvas, view: View) -> tuple[int, Canvas]:
        return view.committed_len, view.canvas

    with patch.object(FullCanvas, "restart", keep):
        assert any(wrong_when_crowded("dual", seed) for seed in range(6))


def test_caches_approximate_unless_they_refresh_at_every_step() -> None:
    tokens: dict[str, list[list[int]]] = {}
    for name, knobs in {
        "none": {},
        "dual": {"cache": "dual"},
        "fresh dual": {"cache": "dual", "refresh_interval": 1},
        "fresh prefix": {"cache": "prefix", "refresh_interval": 1},
    }.items():
        for seed in range(5):
            ours = engine(ToyModel(seed))
            key = ours.submit([1, 2, 3, 4, 5], 24, NAME, {"block_length": 8, **knobs})
            ours.run()
            tokens.setdefault(name, []).append(ours.results[key].tokens)
    assert tokens["fresh dual"] == tokens["fresh prefix"] == tokens["none"]
    assert tokens["dual"] != tokens["none"], "the control: a stale cache is seen"


def test_an_end_of_sequence_inside_a_block_ends_the_request_early() -> None:
    num_early = 0
    for seed in range(8):
        results = []
        for ignore_eos in (True, False):
            ours = engine(ToyModel(seed))
            knobs = {"remasking": "low_confidence", "block_length": 6}
            options = {"ignore_eos": ignore_eos, "logit_bias": {EOS: 9.0}}
            key = ours.submit([seed + 1, 2], 24, NAME, knobs, **options)
            ours.run()
            results.append(ours.results[key])
        whole, ended = results
        if EOS not in whole.tokens:
            assert ended.tokens == whole.tokens
            continue
        assert ended.tokens == whole.tokens[: whole.tokens.index(EOS) + 1]
        forwards = [one.finish.usage.forward_passes for one in (ended, whole)]
        assert forwards[0] <= forwards[1]
        num_early += forwards[0] < forwards[1]
    assert num_early > 0


def test_without_a_length_the_answer_is_as_long_as_lladas() -> None:
    ours = engine(ToyModel(0), Setup(token_budget=256, logit_budget=256, max_model_len=200))
    key = ours.submit([1, 2, 3], None, NAME, {"threshold": 0.0})
    ours.run()
    assert len(ours.results[key].tokens) == 128


def test_a_dual_cache_computes_blocks_and_a_prefix_cache_what_follows() -> None:
    for cache, lengths in (("none", {26}), ("prefix", {26, 24, 16, 8}), ("dual", {26, 8})):
        ours = engine(ToyModel(1))
        knobs = {"cache": cache, "block_length": 8, "threshold": 1.5}
        ours.submit([1, 2], 24, NAME, knobs)
        ours.run()
        assert {span.num_tokens for plan in ours.plans for span in plan.spans} == lengths


@pytest.mark.parametrize(
    ("knobs", "param", "words"),
    [
        ({"block_length": 0}, "block_length", "whole number in"),
        ({"block_length": 25}, "block_length", "max_tokens 24"),
        ({"block_length": 8, "steps": 7}, "steps", "a multiple of the 3 blocks"),
        ({"block_length": 8, "steps": 27}, "steps", "from 3 to 24"),
        ({"steps": 0}, "steps", "whole number in"),
        ({"cache": "sparsest"}, "cache", "one of none, prefix, dual, sparse"),
        ({"retention_ratio": 0.5}, "retention_ratio", "left out with cache none"),
        ({"cache": "dual", "pool_kernel": 3}, "pool_kernel", "sparse reads it"),
        ({"cache": "sparse", "retention_ratio": 0}, "retention_ratio", "above 0 and at most 1"),
        ({"cache": "sparse", "retention_ratio": 1.5}, "retention_ratio", r"in \[0, 1\]"),
        ({"cache": "sparse", "delay_step": -1}, "delay_step", "whole number in"),
        ({"cache": "sparse", "pool_kernel": 2}, "pool_kernel", "odd"),
        ({"cache": "sparse", "head_select": 1}, "head_select", "true or false"),
        ({"refresh_interval": 2}, "refresh_interval", "cache none"),
        ({"cache": "dual", "refresh_interval": 0}, "refresh_interval", "whole number in"),
        ({"threshold": -1}, "threshold", "at least 0"),
        ({"knob": 1}, "knob", "Unknown decoding parameter"),
    ],
)
def test_bad_knobs_are_named(knobs: dict[str, Any], param: str, words: str) -> None:
    ours = engine(ToyModel(0))
    with pytest.raises(InvalidRequest, match=words) as caught:
        ours.submit([1, 2], 24, NAME, knobs)
    assert caught.value.param == f"decoding.params.{param}"


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (Setup(token_budget=25, logit_budget=64), "--token-budget is 25"),
        (Setup(token_budget=64, logit_budget=23), "--logit-budget is 23"),
        (Setup(token_budget=64, logit_budget=64, num_pages=6), "need 7 KV pages"),
    ],
)
def test_a_canvas_that_can_never_run_is_refused(setup: Setup, words: str) -> None:
    with pytest.raises(ServiceError, match=words):
        engine(ToyModel(0), setup).submit([1, 2], 24, NAME, {"cache": "dual"})


def test_without_a_cache_no_page_is_taken() -> None:
    ours = engine(ToyModel(0), Setup(token_budget=64, logit_budget=64, num_pages=1))
    keys = [ours.submit([1, 2, seed], 24, NAME, {"block_length": 8}) for seed in range(3)]
    while ours.step():
        assert ours.pages.num_used == 0
    assert all(len(ours.results[key].tokens) == 24 for key in keys)


def refreshes_per_step(canvas_budget: int) -> tuple[list[int], list[list[int]]]:
    """How many canvases were computed whole in every step, and everybody's tokens."""
    setup = Setup(token_budget=256, logit_budget=256, canvas_budget=canvas_budget, max_rows=6)
    ours = engine(ToyModel(3), setup)
    knobs = {"cache": "dual", "block_length": 4, "threshold": 1.5}
    keys = [ours.submit([seed + 1, 2, 3], 12, NAME, knobs) for seed in range(6)]
    ours.run()
    counts = [sum(span.is_whole for span in plan.spans) for plan in ours.plans]
    return counts, [ours.results[key].tokens for key in keys]


def test_refreshes_are_spread_over_steps() -> None:
    together, wanted = refreshes_per_step(canvas_budget=256)
    assert max(together) == 6, "the control: nothing holds them apart"
    spread, tokens = refreshes_per_step(canvas_budget=16)
    assert max(spread) == 2, "the second one overdraws a budget of 16 by 14"
    assert sum(spread) == sum(together)
    assert tokens == wanted


def fill_between(
    model: ToyModel, prompt: list[int], answer: int, pinned: dict[int, int]
) -> list[int]:
    """One position a step, the surest first, between tokens that stand from the start."""
    tokens = [*prompt, *(pinned.get(len(prompt) + i, MASK) for i in range(answer))]
    hidden = [p for p in range(len(prompt), len(tokens)) if p not in pinned]
    while hidden:
        logits = model.dense(tokens, FULL)
        logits[:, MASK] = -torch.inf
        sure = {p: logits[p].softmax(-1).max().item() for p in hidden}
        best = max(hidden, key=lambda p: (sure[p], -p))
        tokens[best] = int(logits[best].argmax())
        hidden.remove(best)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_pinned_tokens_stand_from_the_start(cache: str) -> None:
    num_changed = 0
    for seed in range(6):
        rng, model = random.Random(seed), ToyModel(seed)
        ours, asked = engine(model), {}
        for _ in range(3):
            prompt, answer = random_prompt(rng, 1, 9), rng.randint(6, 16)
            places = rng.sample(range(len(prompt), len(prompt) + answer), rng.randint(1, 5))
            pinned = {place: rng.randrange(MASK) for place in sorted(places)}
            knobs = {"threshold": 1.5, "block_length": answer, "cache": cache}
            knobs |= {"refresh_interval": 1} if cache == "dual" else {}
            key = ours.submit(prompt, answer, NAME, knobs, pinned=tuple(pinned.items()))
            asked[key] = (prompt, answer, pinned)
        while ours.scheduler.has_work:
            ours.step()
            if rng.random() < 0.2:
                ours.preempt(rng.choice(list(asked)))
        ours.check_empty()
        for key, (prompt, answer, pinned) in asked.items():
            wanted = fill_between(model, prompt, answer, pinned)
            assert ours.results[key].tokens == wanted
            assert ours.results[key].finish.usage.output_tokens == answer - len(pinned)
            free = fill_between(model, prompt, answer, {})
            num_changed += any(
                free[i] != token for i, token in enumerate(wanted) if len(prompt) + i not in pinned
            )
    assert num_changed > 0, "the control: pinned tokens change what is between them"


@pytest.mark.parametrize("prompt_len", [3, 8])
def test_canvases_that_are_shown_name_their_block(prompt_len: int) -> None:
    """Counted from the end of the prompt; step and block together are each told once."""
    llada = engine(ToyModel(5))
    knobs = {"block_length": 4, "steps": 6, "remasking": "random"}
    prompt = random_prompt(random.Random(prompt_len), prompt_len, prompt_len)
    key = llada.submit(prompt, 12, "full_canvas", knobs, emit_canvas=True)
    llada.run()
    result = llada.results[key]
    told = [
        (block, canvas.step)
        for block, (_, canvas) in zip(result.blocks, result.canvases, strict=True)
    ]
    assert sorted(set(told)) == told
    assert {block for block, _ in told} == {0, 1, 2}
    for block, (start, canvas) in zip(result.blocks, result.canvases, strict=True):
        opened = start + canvas.fixed.index(False) - prompt_len
        assert opened // 4 == block
