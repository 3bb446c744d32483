"""Grammars, bad words and lists of allowed tokens against slow decoding over plain logits."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch

from engine_service.core.constraint import Constraint
from engine_service.core.messages import FinishReason
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.decoding.full_canvas import FullCanvas
from tests.equivalence.harness import AR, BLOCK, EOS, Result, Setup, ToyEngine
from tests.equivalence.references import random_prompt, reference_ar, reference_block
from tests.equivalence.toy_grammar import Automaton, ToyGrammars, ToyMatcher, reference, spec
from tests.fakes import MASK, VOCAB, ToyModel
from tidemill.runtime.errors import InvalidRequest, Unsupported

SIZE = 4


def engine_of(model: ToyModel, **setup: object) -> ToyEngine:
    return ToyEngine(model, Setup(block=SIZE, **setup), grammars=ToyGrammars())  # type: ignore[arg-type]


def reason_of(result: Result, count: int, which: int) -> FinishReason:
    """How a constrained request must end."""
    automaton, state = Automaton(which), 0
    for token in result.tokens:
        if token == EOS:
            return FinishReason.STOP_TOKEN
        state = automaton.edges[state][token]
    if not automaton.edges[state]:
        return FinishReason.STOP_TOKEN
    assert len(result.tokens) == count
    return FinishReason.LENGTH


def wrong_under_grammars(rounds: range, *, overlaps: bool, preempts: bool = False) -> int:
    """Of requests of both methods, with and without grammars, side by side: how many differ from
    the reference."""
    num_wrong, num_ended = 0, 0
    for seed in rounds:
        rng, model = random.Random(seed), ToyModel(seed)
        engine = engine_of(model, max_rows=5, overlaps=overlaps)
        asked = {}
        for index in range(8):
            prompt, count = random_prompt(rng, 1, 12), rng.randint(1, 14)
            method = BLOCK if index % 2 else AR
            which = rng.randrange(10_000) if index % 3 else None
            fields = {} if which is None else {"constraint": spec(which), "ignore_eos": False}
            asked[engine.submit(prompt, count, method, **fields)] = (prompt, count, method, which)
        while engine.step() or engine.scheduler.has_work:
            if preempts and rng.random() < 0.3:
                engine.preempt(rng.choice(list(asked)))
        engine.check_empty()
        for key, (prompt, count, method, which) in asked.items():
            result, block = engine.results[key], SIZE if method == BLOCK else None
            if which is None:
                want = (
                    reference_block(model, prompt, count, SIZE, {})
                    if block
                    else reference_ar(model, prompt, count)
                )
            else:
                want = reference(model, prompt, count, which, block)
                if result.tokens == want:
                    num_wrong += result.finish.reason is not reason_of(result, count, which)
                    num_ended += result.finish.reason is FinishReason.STOP_TOKEN
            num_wrong += result.tokens != want
    assert num_ended or num_wrong, "no grammar came to its end"
    return num_wrong


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("preempts", [False, True])
def test_grammars_equal_slow_decoding(seed: int, overlaps: bool, preempts: bool) -> None:
    rounds = range(seed, seed + 6)
    assert wrong_under_grammars(rounds, overlaps=overlaps, preempts=preempts) == 0


def test_shifted_blocks_under_grammars(seed: int) -> None:
    differs = False
    for round_seed in range(seed, seed + 6):
        rng, model = random.Random(round_seed), ToyModel(round_seed)
        strategy = BlockDiffusion(block=SIZE, mask_token_id=MASK, logits_shift=1)
        engine = ToyEngine(
            model,
            Setup(block=SIZE, overlaps=True),
            strategies={BLOCK: strategy},
            default_method=BLOCK,
            shifts={BLOCK: 1},
            grammars=ToyGrammars(),
        )
        prompts = [random_prompt(rng, 1, 12) for _ in range(4)]
        keys = [
            engine.submit(prompt, 12, BLOCK, constraint=spec(round_seed), ignore_eos=False)
            for prompt in prompts
        ]
        engine.run()
        for key, prompt in zip(keys, prompts, strict=True):
            want = reference(model, prompt, 12, round_seed, SIZE, shift=1)
            assert engine.results[key].tokens == want
            differs |= want != reference(model, prompt, 12, round_seed, SIZE)
    assert differs, "without the shift the same would have come out"


def test_control_a_mask_that_lags_behind_shows(seed: int) -> None:
    def stale(self: Constraint, run: list[int], stop: object) -> object:
        return stop

    with patch.object(Constraint, "read", stale):
        assert wrong_under_grammars(range(seed, seed + 6), overlaps=False) > 0


def test_grammars_with_everything_beside_them(seed: int) -> None:
    """Draws, n, log-probabilities and steps that overlap: the same tokens, all of them allowed."""
    found = []
    for overlaps in (False, True):
        engine = engine_of(ToyModel(seed), max_rows=3, overlaps=overlaps)
        for index in range(9):
            engine.submit(
                [1, 2, 3], 12, BLOCK if index % 2 else AR, constraint=spec(seed + index % 4),
                ignore_eos=False, temperature=0.9, top_k=9, seed=seed, choice=index, logprobs=2,
                min_tokens=3,
            )  # fmt: skip
        engine.run()
        found.append([(r.tokens, r.logprobs) for r in engine.results.values()])
        for index, result in enumerate(engine.results.values()):
            which = seed + index % 4
            assert result.finish.reason is reason_of(result, 12, which)
            assert len(result.logprobs) == len(result.tokens)
            for entry in result.logprobs:
                assert entry is not None
                assert entry.logprobs[0] > -torch.inf
    assert found[0] == found[1]


@pytest.mark.parametrize("method", [AR, BLOCK])
def test_allowed_tokens_and_single_bad_words(seed: int, method: str) -> None:
    """A static mask, under any rule; neighbours without one stay as they are."""
    rng = random.Random(seed)
    for _ in range(6):
        model = ToyModel(rng.randrange(1000))
        allowed = rng.sample(range(VOCAB - 1), rng.randint(2, 12))
        bad = rng.choice(allowed)
        prompt = random_prompt(rng, 1, 12)
        engine = engine_of(model, overlaps=bool(rng.randrange(2)))
        fields = {"allowed_token_ids": tuple(allowed), "bad_words": ((bad,),)}
        key = engine.submit(prompt, 10, method, **fields)
        free = engine.submit(prompt, 10, method)
        engine.run()
        plain = (
            reference_ar(model, prompt, 10)
            if method == AR
            else reference_block(model, prompt, 10, SIZE, {})
        )
        assert engine.results[free].tokens == plain
        assert set(engine.results[key].tokens) <= {*allowed} - {bad}
        if method == AR:
            assert engine.results[key].tokens == masked_ar(model, prompt, 10, {*allowed} - {bad})


def masked_ar(model: ToyModel, prompt: list[int], count: int, allowed: set[int]) -> list[int]:
    tokens = list(prompt)
    ids = sorted(allowed)
    for _ in range(count):
        logits = model.dense(tokens, 1)[-1]
        tokens.append(ids[int(logits[ids].argmax())])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("method", [AR, BLOCK])
def test_bad_words_of_several_tokens_never_appear(seed: int, method: str) -> None:
    """Those that a free run says: it must go another way, and only there."""
    rng, changed = random.Random(seed), 0
    for _ in range(8):
        model, prompt = ToyModel(rng.randrange(1000)), random_prompt(rng, 1, 9)
        free = engine_of(model)
        knobs = {"remasking": "sequential"} if method == BLOCK else {}
        first = free.submit(prompt, 16, method, knobs)
        free.run()
        said = free.results[first].tokens
        words = tuple(tuple(said[i : i + n]) for i, n in ((2, 2), (7, 3), (11, 2)))
        engine = engine_of(model, overlaps=True)
        key = engine.submit(prompt, 16, method, bad_words=words)
        engine.run()
        got = engine.results[key].tokens
        for word in words:
            for at in range(len(got)):
                assert tuple(got[at : at + len(word)]) != word
        until = next(i for i, (a, b) in enumerate(zip(got, said, strict=True)) if a != b)
        assert any(until in range(i, i + 3) for i in (2, 7, 11)) or until < 2
        changed += got != said
    assert changed == 8


def test_what_leaves_nothing_ends_its_request_alone(seed: int) -> None:
    engine = engine_of(ToyModel(seed))
    bad = tuple((token,) for token in (*Automaton(5).edges[0], EOS))
    dead = engine.submit([1, 2], 8, constraint=spec(5), bad_words=bad)
    fine = engine.submit([1, 2], 8)
    engine.run()
    assert engine.results[dead].finish.reason is FinishReason.DEAD_END
    assert "no token is left" in engine.results[dead].finish.detail
    assert engine.results[dead].tokens == []
    assert engine.results[fine].tokens == reference_ar(ToyModel(seed), [1, 2], 8)


@pytest.mark.parametrize("failure", [OSError("no memory"), BaseException("no memory")])
def test_a_grammar_library_that_fails_ends_its_request_alone(failure: BaseException) -> None:
    """It is no dead end. The masks of the others were asked for in the same breath."""
    model, numbers, masks = ToyModel(3), (5, 7, 2), ToyGrammars.masks
    engine = engine_of(model)
    keys = [engine.submit([1, 2], 8, constraint=spec(number)) for number in numbers]
    listed = engine.submit([1, 2], 8, allowed_token_ids=(3, 4))

    def fails(self: ToyGrammars, matchers: list[ToyMatcher]) -> list[bytes]:
        if any(one.automaton.edges == Automaton(5).edges for one in matchers):
            raise failure
        return masks(self, matchers)

    # From the first mask on: a thread makes the next one as soon as a step has ended.
    with patch.object(ToyGrammars, "masks", fails):
        engine.run()
    bad, *good = [engine.results[key] for key in keys]
    assert bad.finish.reason is FinishReason.ERROR
    assert bad.finish.detail == f"the grammar failed: {type(failure).__name__}: no memory"
    for result, number in zip(good, numbers[1:], strict=True):
        assert result.tokens == reference(model, [1, 2], 8, number, None)
    assert engine.results[listed].tokens == masked_ar(model, [1, 2], 8, {3, 4})


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"constraint": spec(1)._replace(text="x")}, InvalidRequest, "constraint.regex"),
        ({"allowed_token_ids": (VOCAB,)}, InvalidRequest, "allowed_token_ids"),
        ({"allowed_token_ids": (MASK,)}, InvalidRequest, "allowed_token_ids"),
        ({"allowed_token_ids": (3,), "bad_words": ((3,),)}, InvalidRequest, "allowed_token_ids"),
        ({"bad_words": ((),)}, InvalidRequest, "bad_words"),
        ({"bad_words": ((1, VOCAB),)}, InvalidRequest, "bad_words"),
        ({"constraint": spec(1), "pinned": ((4, 1),)}, Unsupported, "pinned"),
        ({"constraint": spec(1), "knobs": {"steps": 2}}, InvalidRequest, "decoding.params.steps"),
    ],
)
def test_what_cannot_work_is_named(
    fields: dict[str, object], kind: type[Exception], param: str
) -> None:
    engine = engine_of(ToyModel(1))
    with pytest.raises(kind) as caught:
        engine.submit([1, 2, 3], 8, BLOCK, **fields)  # type: ignore[arg-type]
    assert caught.value.param == param  # type: ignore[attr-defined]
    assert not engine.scheduler.has_work


def test_an_engine_without_masks_says_so() -> None:
    engine = ToyEngine(ToyModel(1), Setup())
    for param, fields in (
        ("constraint.regex", {"constraint": spec(1)}),
        ("allowed_token_ids", {"allowed_token_ids": (1,)}),
        ("bad_words", {"bad_words": ((1,),)}),
    ):
        with pytest.raises(Unsupported, match="does not serve") as caught:
            engine.submit([1], 4, **fields)
        assert caught.value.param == param


def test_a_full_canvas_takes_lists_and_refuses_what_goes_token_by_token(seed: int) -> None:
    """Its blocks may start anew, and with them tokens that a grammar has read."""
    name = "full_canvas"
    engine = ToyEngine(
        ToyModel(seed),
        Setup(token_budget=256, logit_budget=256),
        strategies={name: FullCanvas(mask_token_id=MASK, logits_shift=0)},
        default_method=name,
        shifts={name: 0},
        grammars=ToyGrammars(),
    )
    knobs = {"steps": 8, "block_length": 8}
    alone = engine.submit([1, 2, 3], 8, name, knobs)
    engine.run()
    said = engine.results[alone].tokens
    # Without one that is said freely: else the list may happen to forbid nothing.
    others = [token for token in range(VOCAB - 1) if token != said[0]]
    allowed = tuple(random.Random(seed).sample(others, 6))
    key = engine.submit([1, 2, 3], 8, name, knobs, allowed_token_ids=allowed)
    free = engine.submit([1, 2, 3], 8, name, knobs)
    engine.run()
    assert set(engine.results[key].tokens) <= set(allowed)
    assert engine.results[free].tokens == said
    for param, fields in (
        ("constraint.regex", {"constraint": spec(1)}),
        ("bad_words", {"bad_words": ((1, 2),)}),
    ):
        with pytest.raises(Unsupported, match="does not support") as caught:
            engine.submit([1], 8, name, knobs, **fields)
        assert caught.value.param == param
