"""Pinned tokens: the engine equals a slow reference in which they are given from the start."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest

from engine_service.core import opening, request
from engine_service.core.messages import FinishReason
from engine_service.core.pinning import Pinned
from engine_service.core.step import FULL
from engine_service.decoding.full_canvas import FullCanvas
from tests import fakes
from tests.equivalence.harness import AR, BLOCK, EOS, Setup, ToyEngine
from tests.equivalence.references import (
    GREEDY_RULES,
    random_knobs,
    random_prompt,
    reference_ar,
    reference_block,
    show,
    with_defaults,
)
from tests.equivalence.rule_reference import slow_adapt, slow_rule
from tests.fakes import MASK, VOCAB, ToyModel
from tests.sampling_batches import choosing_all
from tidemill.runtime.errors import InvalidRequest

CANVAS = "full_canvas"


@dataclass
class Asked:
    """A request with pinned tokens by position."""

    prompt: list[int]
    count: int
    knobs: dict[str, Any]
    pinned: dict[int, int] = field(default_factory=dict)


def submit(engine: ToyEngine, asked: Asked, **options: Any) -> int:
    pinned = list(asked.pinned.items())
    random.Random(len(pinned)).shuffle(pinned)
    return engine.submit(
        asked.prompt, asked.count, BLOCK, asked.knobs, pinned=tuple(pinned), **options
    )


def reference(
    model: ToyModel, asked: Asked, block: int, *, full: bool = False, banned: Sequence[int] = ()
) -> list[int]:
    """Every forward computes everything; a pinned position is never a mask and never decided.

    Blocks are seen up to their end, or, with `full`, counted from the prompt with all in sight.
    """
    start, end = len(asked.prompt), len(asked.prompt) + asked.count
    tokens, knobs = list(asked.prompt), with_defaults(asked.knobs, block)
    if full:
        tokens += [asked.pinned.get(p, MASK) for p in range(start, end)]
    while start < end:
        stop = min(start + block, end) if full else (start // block + 1) * block
        tokens += [asked.pinned.get(p, MASK) for p in range(len(tokens), stop)]
        hidden = [p for p in range(start, stop) if p not in asked.pinned]
        num_masks, step, adapted = len(hidden), 0, knobs["start_threshold"]
        while hidden:
            logits = model.dense(tokens, FULL if full else block)
            logits[:, MASK] = -float("inf")
            allowed = logits.clone()
            allowed[:, list(banned)] = -float("inf")
            best = [int(allowed[p].argmax()) for p in hidden]
            shown = show(logits, hidden, best, 0, step)
            taken = slow_rule(shown, num_masks=num_masks, step=step, knobs=knobs, adapted=adapted)
            for place in taken:
                tokens[hidden[place]] = best[place]
            adapted = slow_adapt(adapted, len(taken), len(hidden))
            hidden = [p for i, p in enumerate(hidden) if i not in taken]
            step += 1
        start = stop
    return tokens[len(asked.prompt) : end]


def random_request(rng: random.Random, block: int, rules: Sequence[str] = GREEDY_RULES) -> Asked:
    """Pinned here and there, in runs over borders, in whole blocks, to the end, or all but one."""
    prompt, count = random_prompt(rng, 1, 12), rng.randint(4, 22)
    places = range(len(prompt), len(prompt) + count)
    kind = rng.randrange(5)
    if kind == 0:
        chosen = [p for p in places[1:] if rng.random() < 0.3]
    elif kind == 1:
        start = rng.choice(places[1:])
        chosen = list(range(start, min(start + 2 * block, places.stop)))
    elif kind == 2:
        chosen = list(places[rng.randint(1, count) :])
    elif kind == 3:
        chosen = [p for p in places if (p // block) % 2 and p > places.start]
    else:
        chosen = list(places)
        chosen.remove(rng.choice(places))
    knobs = random_knobs(rng, block, rules)
    if knobs["remasking"] == "low_confidence_dynamic":
        knobs["steps"] = block  # its schedule counts whole blocks: one position at least, like this
    return Asked(prompt, count, knobs, {p: rng.randrange(VOCAB) for p in chosen})


def wrong_answers(
    seed: int, setup: Setup, *, preempts: float = 0.0, rules: Sequence[str] = GREEDY_RULES
) -> tuple[int, int]:
    """(requests that differ from the reference, preemptions); ordinary rows run beside them."""
    rng, model = random.Random(seed), ToyModel(seed)
    engine = ToyEngine(model, setup)
    asked: dict[int, Asked] = {}
    plain: dict[int, tuple[list[int], str]] = {}
    for _ in range(5):
        one = random_request(rng, setup.block, rules)
        asked[submit(engine, one)] = one
        method = rng.choice([AR, BLOCK])
        prompt = random_prompt(rng, 1, 9)
        plain[engine.submit(prompt, 9, method, {})] = prompt, method
    while engine.scheduler.has_work:
        engine.step()
        if rng.random() < preempts:
            engine.preempt(rng.choice(list(asked)))
    engine.check_empty()
    wrong = 0
    for key, one in asked.items():
        result = engine.results[key]
        wrong += result.tokens != reference(model, one, setup.block)
        assert result.finish.reason == FinishReason.LENGTH
        assert result.finish.usage.output_tokens == one.count - len(one.pinned)
    for key, (prompt, method) in plain.items():
        expected = (
            reference_ar(model, prompt, 9)
            if method == AR
            else reference_block(model, prompt, 9, setup.block, {})
        )
        assert engine.results[key].tokens == expected
    return wrong, sum(r.finish.usage.preemptions for r in engine.results.values())


SETUPS = [
    (Setup(block=4), 0.0),
    (Setup(block=8, page_size=4, max_rows=6, overlaps=True), 0.0),
    (Setup(block=4, max_rows=3, num_pages=16, token_budget=8, logit_budget=4), 0.0),
    (Setup(block=8, page_size=2, max_rows=3, overlaps=True), 0.3),
    (Setup(block=1, max_rows=3), 0.2),
]


@pytest.mark.parametrize(("setup", "preempts"), SETUPS)
def test_pinned_tokens_are_as_if_they_had_always_been_there(
    setup: Setup, preempts: float, seed: int
) -> None:
    preemptions = 0
    for round_seed in range(seed, seed + 4):
        wrong, forced = wrong_answers(round_seed, setup, preempts=preempts)
        assert wrong == 0, round_seed
        preemptions += forced
    assert preempts == 0 or preemptions > 0


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_a_full_canvas_sees_what_is_pinned_behind(cache: str) -> None:
    """Also in blocks far behind; a cache is exact where a block takes one step."""
    differ = 0
    for seed in range(4):
        rng, model = random.Random(seed), ToyModel(seed)
        strategy = FullCanvas(mask_token_id=MASK, logits_shift=0)
        engine = ToyEngine(
            model, Setup(max_rows=3), strategies={CANVAS: strategy}, default_method=CANVAS
        )
        keys = {}
        for _ in range(3):
            one = random_request(rng, 4)
            one.knobs = {"remasking": "threshold", "threshold": rng.choice([0.0, 0.4, 1.5])}
            if cache != "none":
                one.knobs["threshold"] = 0.0
            block = min(4, one.count)
            shape = {"block_length": block, "cache": cache}
            pinned = tuple(one.pinned.items())
            key = engine.submit(
                one.prompt, one.count, CANVAS, one.knobs | shape, pinned=pinned, logprobs=0
            )
            keys[key] = one
        while engine.scheduler.has_work:
            engine.step()
            if rng.random() < 0.2:
                engine.preempt(rng.choice(list(keys)))
        engine.check_empty()
        for key, one in keys.items():
            result = engine.results[key]
            assert result.tokens == reference(model, one, min(4, one.count), full=True)
            unpinned = Asked(one.prompt, one.count, one.knobs)
            free = reference(model, unpinned, min(4, one.count), full=True)
            first = min(one.pinned, default=10**6) - len(one.prompt)
            differ += free[:first] != result.tokens[:first]
            for place, entry in enumerate(result.logprobs, len(one.prompt)):
                assert (entry is None) == (place in one.pinned)
    assert differ > 0, "what is pinned behind a hole never mattered"


def num_wrong(**options: Any) -> int:
    """Also where host and device do not agree on what is open: the rows beside these are right."""
    with patch.object(fakes, "check_open"), choosing_all():
        return sum(wrong_answers(seed, Setup(block=4), **options)[0] for seed in range(3))


def test_control_a_first_canvas_without_its_pinned_tokens_is_seen() -> None:
    with patch.object(opening, "pin", lambda canvas, start, pinned: canvas):
        assert num_wrong() > 0


def test_control_later_blocks_without_their_pinned_tokens_are_seen() -> None:
    with patch.object(request, "pinned_from", lambda pinned, position: ()):
        assert num_wrong() > 0


def test_control_a_row_that_comes_back_without_its_pinned_tokens_is_seen() -> None:
    real, told = request.pinned_from, set()

    def once(pinned: Pinned, position: int) -> Pinned:
        if pinned in told:
            return ()
        told.add(pinned)
        return real(pinned, position)

    with patch.object(request, "pinned_from", once):
        assert num_wrong() == 0
        told.clear()
        assert num_wrong(preempts=0.5) > 0


def test_control_a_block_that_starts_anew_without_its_pinned_tokens_is_seen() -> None:
    """The adaptive rule remembers its steps: a preempted block begins again with masks."""
    assert num_wrong(preempts=0.5, rules=["adaptive"]) == 0
    with patch.object(request, "pin", lambda canvas, start, pinned: canvas):
        assert num_wrong(preempts=0.5, rules=["adaptive"]) > 0


def test_a_stop_token_neither_fills_a_hole_nor_ends_what_is_given() -> None:
    """EOS is the likeliest token everywhere; it may end the request behind the last pinned one."""
    model = ToyModel(2)
    model.head[EOS] += 2 * model.head.std()
    engine = ToyEngine(model, Setup(block=4))
    prompt, knobs = [1, 2, 3], {"threshold": 0.0}
    free = engine.submit(prompt, 24, BLOCK, knobs, ignore_eos=False)
    asked = Asked(prompt, 24, knobs, {9: 5, 10: EOS, 13: 6})
    held = submit(engine, asked, ignore_eos=False)
    engine.run()
    assert engine.results[free].tokens[-1] == EOS
    assert len(engine.results[free].tokens) < 10, "the model does not want to end"
    result = engine.results[held]
    holes = [t for p, t in enumerate(result.tokens, 3) if p <= 13 and p not in asked.pinned]
    assert EOS not in holes
    assert result.tokens[:11] == reference(model, asked, 4, banned=[EOS])[:11]
    assert [result.tokens[p - 3] for p in asked.pinned] == [5, EOS, 6]
    assert result.finish.reason == FinishReason.STOP_TOKEN
    assert result.tokens.index(EOS, 11) == len(result.tokens) - 1


def test_only_generated_tokens_have_log_probabilities() -> None:
    model = ToyModel(1)
    engine = ToyEngine(model, Setup(block=4))
    asked = Asked([1, 2, 3, 4], 16, {"threshold": 0.3}, {5: 9, 8: 3, 9: 3, 10: 3, 11: 3, 18: 7})
    key = submit(engine, asked, logprobs=1)
    engine.run()
    result = engine.results[key]
    assert len(result.logprobs) == len(result.tokens) == 16
    for position, (token, entry) in enumerate(zip(result.tokens, result.logprobs, strict=True), 4):
        assert (entry is None) == (position in asked.pinned)
        assert entry is None or entry.token_ids[0] == token


def test_what_is_pinned_to_the_end_costs_no_forward_pass() -> None:
    engine = ToyEngine(ToyModel(0), Setup(block=4))
    knobs = {"threshold": 0.0}
    tail = Asked([1, 2, 3, 4], 40, knobs, dict.fromkeys(range(6, 44), 5))
    key = submit(engine, tail)
    between = submit(engine, Asked([1, 2, 3, 4], 40, knobs, dict.fromkeys(range(6, 43), 5)))
    engine.run()
    assert engine.results[key].finish.usage.forward_passes == 1
    assert engine.results[between].finish.usage.forward_passes == 10
    for one in (key, between):
        assert engine.results[one].tokens[2:39] == [5] * 37


def test_canvases_show_pinned_tokens_from_the_start() -> None:
    engine = ToyEngine(ToyModel(0), Setup(block=4))
    asked = Asked([1, 2, 3, 4], 12, {"threshold": 1.5}, {6: 9, 9: 8, 10: 7})
    key = submit(engine, asked, emit_canvas=True)
    engine.run()
    seen = set()
    for start, canvas in engine.results[key].canvases:
        for position, (token, fixed) in enumerate(
            zip(canvas.token_ids, canvas.fixed, strict=True), start
        ):
            if position in asked.pinned:
                assert (token, fixed) == (asked.pinned[position], True)
                seen.add(position)
    assert seen == set(asked.pinned)


def test_usage_of_a_text_cut_at_a_stop_string_leaves_out_what_was_pinned_before() -> None:
    engine = ToyEngine(ToyModel(), Setup(block=8))
    pinned = tuple((position, 3) for position in (4, 5, 6, 20))
    key = engine.submit([1, 2, 3, 4], 20, BLOCK, pinned=pinned)
    while len(engine.results[key].tokens) < 12:
        engine.step()
    engine.abort(key, reason=FinishReason.STOP_STRING, completion_tokens=5)
    engine.run()
    assert engine.results[key].finish.usage.output_tokens == 5 - 3


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("num_behind", [0, 1, 3, 8, 17])
def test_steps_of_a_canvas_are_those_of_its_gap(num_behind: int, cache: str) -> None:
    """24 positions in 3 blocks take the steps asked for, however long a suffix is, also where the
    request is preempted; tokens pinned elsewhere are part of the answer."""
    for steps, preempts in ((6, True), (24, True), (3, False)):
        strategy = FullCanvas(mask_token_id=MASK, logits_shift=0)
        engine = ToyEngine(
            ToyModel(3), Setup(max_rows=3), strategies={CANVAS: strategy}, default_method=CANVAS
        )
        knobs = {"steps": steps, "block_length": 8, "cache": cache}
        pinned = tuple((2 + 24 + place, 5) for place in range(num_behind))
        key = engine.submit([1, 2], 24 + num_behind, CANVAS, knobs, pinned=pinned)
        engine.step()
        if preempts:
            engine.preempt(key)
        engine.run()
        usage = engine.results[key].finish.usage
        assert usage.output_tokens == 24
        # With a cache a preempted block begins anew.
        assert usage.denoise_steps - usage.preemptions * (cache != "none") == steps


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"block_length": 28}, "at most the length of the answer, 27 with what is pinned"),
        ({"block_length": 8, "steps": 8}, "multiple of the 3 .* a gap of 24 makes, from 3 to 24"),
    ],
)
def test_a_canvas_is_refused_what_does_not_go_with_its_gap(
    knobs: dict[str, Any], words: str
) -> None:
    """With what is pinned behind it there would be 4 such blocks."""
    strategy = FullCanvas(mask_token_id=MASK, logits_shift=0)
    engine = ToyEngine(ToyModel(3), Setup(), strategies={CANVAS: strategy}, default_method=CANVAS)
    pinned = tuple((2 + 24 + place, 5) for place in range(3))
    with pytest.raises(InvalidRequest, match=words):
        engine.submit([1, 2], 27, CANVAS, knobs, pinned=pinned)
