"""The restated loops keep their own promises, agree where their definitions do, and can differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from engine_service.core.step import FULL
from tests.equivalence.oracles import Outcome, select, shares, surest
from tests.equivalence.oracles_dense import DenseToy
from tests.equivalence.oracles_dream import ALGORITHMS, confidence, dream_counts, dream_sample
from tests.equivalence.oracles_fast_dllm import (
    CACHES,
    Rule,
    factor_rule,
    fast_dllm_dream_generate,
    fast_dllm_generate,
    schedule_rule,
    threshold_rule,
)
from tests.equivalence.oracles_llada import llada_generate
from tests.equivalence.oracles_sdar import STRATEGIES, sdar_generate
from tests.equivalence.references import random_prompt, reference_block
from tests.fakes import MASK, VOCAB, ToyModel

LENGTH, BLOCK = 12, 4
SIZES = {"mask_id": MASK, "gen_length": LENGTH, "block_length": BLOCK}
Decode = Callable[[DenseToy, list[int]], Outcome]


def llada(model: DenseToy, prompt: list[int], steps: int = 6) -> Outcome:
    return llada_generate(model.logits, prompt, steps=steps, **SIZES)


def fast(
    model: DenseToy,
    prompt: list[int],
    rule: Rule | None = None,
    cache: str = "none",
    refresh_every: int | None = None,
    shift: int = 0,
    sizes: dict[str, int] = SIZES,
) -> Outcome:
    return fast_dllm_generate(
        model.cached,
        prompt,
        rule=rule or threshold_rule(0.5),
        cache=cache,
        refresh_every=refresh_every,
        shift=shift,
        **sizes,
    )


def fast_dream(
    model: DenseToy, prompt: list[int], cache: str = "dual", threshold: float = 0.5
) -> Outcome:
    return fast_dllm_dream_generate(model.cached, prompt, cache=cache, threshold=threshold, **SIZES)


def dream(
    model: DenseToy,
    prompt: list[int],
    alg: str = "entropy",
    steps: int = 8,
    length: int = LENGTH,
) -> Outcome:
    return dream_sample(model.logits, prompt, mask_id=MASK, gen_length=length, steps=steps, alg=alg)


def sdar(
    model: DenseToy,
    prompt: list[int],
    strategy: str = "low_confidence_dynamic",
    steps: int = BLOCK,
    threshold: float = 0.5,
) -> Outcome:
    return sdar_generate(
        model.block_logits(BLOCK),
        prompt,
        denoising_steps=steps,
        strategy=strategy,
        threshold=threshold,
        **SIZES,
    )


DECODERS: dict[str, Decode] = {
    "llada": llada,
    "dream": dream,
    **{f"fast-{cache}": partial(fast, cache=cache) for cache in CACHES},
    **{f"fast-{cache}-shifted": partial(fast, cache=cache, shift=1) for cache in CACHES},
    **{f"fast-dream-{cache}": partial(fast_dream, cache=cache) for cache in ("prefix", "dual")},
    **{f"sdar-{strategy}": partial(sdar, strategy=strategy) for strategy in STRATEGIES},
}


def cases(seed: int, count: int = 6) -> list[tuple[DenseToy, list[int]]]:
    rng = random.Random(seed)
    models = [DenseToy(ToyModel(rng.randrange(1 << 30))) for _ in range(count)]
    return [(model, random_prompt(rng, 1, 9)) for model in models]


def differ(seed: int, one: Decode, other: Decode) -> bool:
    """Whether two loops do something else on one of forty models (on about half, each alone)."""
    return any(one(model, prompt) != other(model, prompt) for model, prompt in cases(seed, 40))


@pytest.mark.parametrize("name", DECODERS)
def test_every_place_is_revealed_once_and_never_with_the_mask(name: str, seed: int) -> None:
    for model, prompt in cases(seed):
        outcome = DECODERS[name](model, prompt)
        assert len(outcome.tokens) == LENGTH
        assert MASK not in outcome.tokens
        places = sorted(place for revealed in outcome.reveals for place in revealed)
        # SDAR fills the last block, which may end behind what was asked for.
        assert places == list(range(len(places)))
        assert LENGTH <= len(places) < LENGTH + BLOCK
        assert outcome.nfe == len(outcome.reveals)


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "dream"])
def test_blocks_go_from_left_to_right(name: str, seed: int) -> None:
    for model, prompt in cases(seed):
        origin = len(prompt) if name.startswith("sdar") else 0
        reveals = [revealed for revealed in DECODERS[name](model, prompt).reveals if revealed]
        of_forward = [{(origin + place) // BLOCK for place in revealed} for revealed in reveals]
        assert all(len(blocks) == 1 for blocks in of_forward)
        order = [min(blocks) for blocks in of_forward]
        assert order == sorted(order)


@pytest.mark.parametrize(("steps", "counts"), [(3, [4]), (6, [2, 2]), (9, [2, 1, 1])])
def test_llada_reveals_by_its_schedule(steps: int, counts: list[int], seed: int) -> None:
    for model, prompt in cases(seed):
        outcome = llada(model, prompt, steps)
        assert [len(revealed) for revealed in outcome.reveals] == counts * (LENGTH // BLOCK)


def test_llada_with_more_steps_than_masks_runs_forwards_for_nothing(seed: int) -> None:
    for model, prompt in cases(seed):
        outcome = llada(model, prompt, 15)
        assert [len(revealed) for revealed in outcome.reveals] == [1, 1, 1, 1, 0] * 3
        assert outcome.tokens == llada(model, prompt, 12).tokens


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_fast_dllm_with_a_schedule_is_llada(steps: int, seed: int) -> None:
    for model, prompt in cases(seed):
        assert fast(model, prompt, schedule_rule(steps)) == llada(model, prompt, 3 * steps)


@pytest.mark.parametrize("rule", [threshold_rule(1.5), factor_rule(1e-12)], ids=["tau", "factor"])
def test_nothing_sure_enough_is_one_at_a_time(rule: Rule, seed: int) -> None:
    for model, prompt in cases(seed):
        assert fast(model, prompt, rule) == llada(model, prompt, LENGTH)


@pytest.mark.parametrize("rule", [threshold_rule(0.0), factor_rule(99.0)], ids=["tau", "factor"])
def test_everything_sure_enough_is_one_forward_a_block(rule: Rule, seed: int) -> None:
    for model, prompt in cases(seed):
        assert fast(model, prompt, rule) == llada(model, prompt, 3)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_refreshed_in_every_forward_is_none(cache: str, shift: int, seed: int) -> None:
    for model, prompt in cases(seed):
        exact = fast(model, prompt, shift=shift)
        assert fast(model, prompt, cache=cache, refresh_every=1, shift=shift) == exact


def test_fast_dllm_with_a_shift_and_one_block_is_dream(seed: int) -> None:
    counts = dream_counts(LENGTH, 8)
    for model, prompt in cases(seed):
        got = fast(
            model,
            prompt,
            lambda confidences, num_masks, step: surest(confidences, counts[step]),
            shift=1,
            sizes=SIZES | {"block_length": LENGTH},
        )
        assert got == dream(model, prompt, "maskgit_plus")


def test_a_last_block_may_be_shorter(seed: int) -> None:
    """It has fewer masks, and so smaller shares of them."""
    for model, prompt in cases(seed):
        got = fast(model, prompt, schedule_rule(2), sizes=SIZES | {"gen_length": BLOCK + 2})
        assert [len(revealed) for revealed in got.reveals] == [2, 2, 1, 1]
        assert [max(revealed) // BLOCK for revealed in got.reveals] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache": "none"}, {"cache": "prefix"}),
        ({"cache": "none"}, {"cache": "dual"}),
        ({"cache": "prefix"}, {"cache": "dual"}),
        ({"cache": "dual"}, {"cache": "dual", "refresh_every": 2}),
        ({"cache": "none"}, {"cache": "dual", "refresh_every": 2}),
    ],
)
def test_a_stale_cache_shows(one: dict[str, Any], other: dict[str, Any], seed: int) -> None:
    """Negative control: what was computed before the tokens changed decides otherwise."""
    long = partial(
        fast, rule=threshold_rule(1.5), sizes=SIZES | {"gen_length": 24, "block_length": 8}
    )
    assert differ(seed, partial(long, **one), partial(long, **other))


def test_dense_toy_is_the_toy(seed: int) -> None:
    for toy, mask_block in ((ToyModel(seed), FULL), (ToyModel(seed + 1), BLOCK)):
        ids = torch.randint(0, VOCAB, (11,))
        want = toy.dense(ids.tolist(), mask_block)
        dense = DenseToy(toy)
        logits = dense.logits if mask_block == FULL else dense.block_logits(BLOCK)
        assert (logits(ids[None])[0] - want).abs().max() < 1e-9


def test_a_past_of_the_same_tokens_changes_nothing_and_another_does(seed: int) -> None:
    model = DenseToy(ToyModel(seed))
    ids = torch.randint(0, VOCAB, (1, 10))
    full, everything = model.cached(ids, torch.arange(10), [])
    inside = torch.tensor([3, 4, 7])
    outside = select(everything, [0, 1, 2, 5, 6, 8, 9])
    again = model.cached(ids[:, inside], inside, outside)[0]
    assert (again - full[:, inside]).abs().max() < 1e-9
    ids[0, 5] = (ids[0, 5] + 1) % VOCAB
    stale = model.cached(ids[:, inside], inside, outside)[0]
    assert (stale - model.logits(ids)[:, inside]).abs().max() > 1e-3


@pytest.mark.parametrize("steps", [1, 2, 5, 12, 20])
def test_dream_reveals_by_its_schedule(steps: int, seed: int) -> None:
    counts = dream_counts(LENGTH, steps)
    assert sum(counts) == LENGTH
    assert len(counts) == steps
    for model, prompt in cases(seed, 3):
        outcome = dream(model, prompt, steps=steps)
        assert [len(revealed) for revealed in outcome.reveals] == counts


def test_dream_counts_by_hand() -> None:
    # 1 - s / t is .24975, .3329..., .4989...: 8 -> 1, 7 -> 2, 5 -> 2, and the rest.
    assert dream_counts(8, 4) == [1, 2, 2, 3]
    # As many steps as masks: the first share stays below one token.
    assert dream_counts(4, 4) == [0, 1, 1, 2]
    assert dream_counts(5, 1) == [5]


def test_dream_confidences_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.4, 0.1], [0.4, 0.3, 0.3]], dtype=torch.float64)
    assert confidence(probs, "maskgit_plus").tolist() == [0.5, 0.4]
    assert confidence(probs, "topk_margin").tolist() == pytest.approx([0.1, 0.1])
    assert confidence(probs, "entropy").tolist() == pytest.approx([-0.943348, -1.088900])


def test_dream_in_one_step_is_the_shifted_greedy_token(seed: int) -> None:
    for model, prompt in cases(seed):
        logits = model.logits(torch.tensor([[*prompt, *[MASK] * LENGTH]]))[0]
        logits[:, MASK] = -torch.inf
        want = logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        for alg in ALGORITHMS:
            assert dream(model, prompt, alg, steps=1).tokens == want


@pytest.mark.parametrize("alg", ALGORITHMS[1:])
def test_another_confidence_shows(alg: str, seed: int) -> None:
    """Negative control."""
    long = partial(dream, steps=18, length=24)
    assert differ(seed, partial(long, alg=alg), partial(long, alg="maskgit_plus"))


def test_dream_without_its_shift_shows(seed: int) -> None:
    """Negative control: one step of LLaDA's loop is Dream's, but for the shift."""
    whole = {"mask_id": MASK, "gen_length": LENGTH, "block_length": LENGTH, "steps": 1}
    shift = partial(dream, alg="maskgit_plus", steps=1)
    assert differ(seed, shift, lambda m, p: llada_generate(m.logits, p, **whole))


def test_a_stale_cache_shows_with_a_shift(seed: int) -> None:
    """Negative control: both the cache, and the query ahead of a block that is computed anew."""
    long = partial(
        fast, rule=threshold_rule(1.5), sizes=SIZES | {"gen_length": 24, "block_length": 8}
    )
    assert differ(seed, partial(long, shift=1), partial(long, shift=1, cache="dual"))
    assert differ(seed, partial(long, cache="dual"), partial(long, shift=1, cache="dual"))


def test_dream_caches_reveal_the_first_of_a_block_alone(seed: int) -> None:
    for model, prompt in cases(seed):
        for cache in ("prefix", "dual"):
            reveals = fast_dream(model, prompt, cache).reveals
            assert [revealed for revealed in reveals if revealed[0] % 4 == 0] == [[0], [4], [8]]
            assert fast_dream(model, prompt, cache, threshold=0.0).nfe == 6
            assert fast_dream(model, prompt, cache, threshold=1.5).nfe == LENGTH


def test_sdar_is_the_reference_of_block_diffusion(seed: int) -> None:
    """One position per step, where SDAR's schedule and ours say the same."""
    rng = random.Random(seed)
    for strategy in STRATEGIES:
        toy, threshold = ToyModel(rng.randrange(1 << 30)), rng.choice([0.3, 0.6, 0.9])
        prompt = random_prompt(rng, 1, 9)
        knobs = {"remasking": strategy, "threshold": threshold, "steps": BLOCK}
        want = reference_block(toy, prompt, LENGTH, BLOCK, knobs)
        assert sdar(DenseToy(toy), prompt, strategy, threshold=threshold).tokens == want


def test_sdar_strategies(seed: int) -> None:
    for model, prompt in cases(seed):
        for revealed in sdar(model, prompt, "sequential", steps=2).reveals:
            assert revealed == list(range(revealed[0], revealed[-1] + 1))
        static = sdar(model, prompt, "low_confidence_static", steps=2)
        assert sdar(model, prompt, threshold=1.0, steps=2) == static
        at_once = sdar(model, prompt, threshold=0.0, steps=2)
        assert at_once.nfe == -(-(len(prompt) + LENGTH) // BLOCK) - len(prompt) // BLOCK
    assert differ(seed, sdar, partial(sdar, strategy="sequential"))


def test_a_mask_in_the_prompt_is_a_token(seed: int) -> None:
    for name, decode in DECODERS.items():
        outcome = decode(DenseToy(ToyModel(seed)), [MASK, 3, MASK])
        assert len(outcome.tokens) == LENGTH, name
        assert all(min(revealed, default=0) >= 0 for revealed in outcome.reveals), name


def test_rules_against_their_definitions(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        sure = [rng.choice([rng.random(), 0.5, 0.99]) for _ in range(rng.randint(1, 8))]
        ranked = sorted(sure, reverse=True)
        factor, threshold = rng.choice([0.1, 0.5, 1.0, 2.0]), rng.random()
        most = [n for n in range(1, len(sure) + 1) if ranked[n - 1] >= 1 - factor / (n + 1)]
        taken = factor_rule(factor)(sure, len(sure), 0)
        assert len(taken) == max(most, default=1)
        assert taken == surest(sure, len(taken))
        above = {index for index, value in enumerate(sure) if value >= threshold}
        best = {sure.index(max(sure))}
        assert set(threshold_rule(threshold)(sure, len(sure), 0)) == (above | best)


def test_the_surest_and_the_shares() -> None:
    assert surest([0.2, 0.7, 0.7, 0.1], 3) == [1, 2, 0]
    assert surest([0.2], 5) == [0]
    assert shares(7, 3) == [3, 2, 2]
    assert shares(2, 4) == [1, 1, 0, 0]
