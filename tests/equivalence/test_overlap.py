"""Launching a step before the one ahead of it is collected changes no token, only the time."""

from __future__ import annotations

import random
from functools import cache
from unittest.mock import patch

import pytest

from engine_service.core.messages import FinishReason
from engine_service.core.request import Request
from engine_service.core.step import Span
from engine_service.decoding.autoregressive import Autoregressive
from tests.equivalence.harness import AR, BLOCK, EOS, Result, Setup, ToyEngine
from tests.equivalence.references import random_prompt, reference_ar
from tests.fakes import ToyModel

NEVER = 1 << 30


def run(
    which: int,
    *,
    overlaps: bool,
    num_pages: int = 30,
    foreseen_tokens: int = NEVER,
    **options: object,
) -> ToyEngine:
    """Eight requests of both methods, with few pages; the same for a number."""
    rng = random.Random(which)
    setup = Setup(
        page_size=2,
        block=4,
        num_pages=num_pages,
        max_rows=5,
        overlaps=overlaps,
        foreseen_tokens=foreseen_tokens,
    )
    engine = ToyEngine(ToyModel(which), setup)
    for index in range(8):
        method = AR if index % 3 else BLOCK
        engine.submit(random_prompt(rng, 1, 14), rng.randint(1, 24), method, **options)
    engine.run()
    return engine


@cache
def run_plainly(which: int, *, num_pages: int = 30, **options: object) -> ToyEngine:
    """One step after the other: what all are compared with."""
    return run(which, overlaps=False, num_pages=num_pages, **options)


def tokens(engine: ToyEngine) -> list[list[int]]:
    return [result.tokens for result in engine.results.values()]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}, {"ignore_eos": False}])
@pytest.mark.parametrize("foreseen_tokens", [NEVER, 12, 0])
def test_overlap_equals_no_overlap(
    seed: int, options: dict[str, object], foreseen_tokens: int
) -> None:
    for round_seed in range(seed, seed + 4):
        plain = run_plainly(round_seed, **options)
        overlapped = run(round_seed, overlaps=True, foreseen_tokens=foreseen_tokens, **options)
        assert tokens(overlapped) == tokens(plain), round_seed
        for one, other in zip(plain.results.values(), overlapped.results.values(), strict=True):
            assert one.finish.reason == other.finish.reason
            assert one.finish.usage.output_tokens == other.finish.usage.output_tokens


@pytest.mark.parametrize("foreseen_tokens", [NEVER, 0])
def test_pages_run_short_while_steps_overlap(seed: int, foreseen_tokens: int) -> None:
    preemptions = 0
    for round_seed in range(seed, seed + 4):
        engine = run(round_seed, overlaps=True, num_pages=26, foreseen_tokens=foreseen_tokens)
        preemptions += sum(r.finish.usage.preemptions for r in engine.results.values())
        assert tokens(engine) == tokens(run_plainly(round_seed, num_pages=200))
    assert preemptions > 0, "the test must force preemptions"


def test_control_a_row_that_looks_too_far_ahead_shows() -> None:
    """It would move on beyond its last page."""

    def to_the_end(self: Request) -> None:
        self.smooth_until = self.max_len

    with (
        patch.object(Request, "look_ahead", to_the_end),
        pytest.raises((AssertionError, IndexError)),
    ):
        run(0, overlaps=True)


def finish_at_eos(overlaps: bool) -> tuple[ToyEngine, Result]:
    for seed in range(200):
        model = ToyModel(seed)
        out = reference_ar(model, [1, 2, 3], 12)
        if EOS in out[1:8]:
            engine = ToyEngine(model, Setup(overlaps=overlaps))
            key = engine.submit([1, 2, 3], 12, ignore_eos=False)
            engine.run()
            assert engine.results[key].tokens == out[: out.index(EOS) + 1]
            return engine, engine.results[key]
    raise AssertionError("no model meets EOS")


def test_an_end_found_late_costs_one_row_step_and_no_token() -> None:
    plain, result = finish_at_eos(overlaps=False)
    overlapped, late = finish_at_eos(overlaps=True)
    assert late.finish.reason == result.finish.reason == FinishReason.STOP_TOKEN
    assert late.finish.usage == result.finish.usage
    assert overlapped.executor.num_steps == plain.executor.num_steps + 1


def test_the_length_is_known_ahead_and_costs_nothing() -> None:
    steps = []
    for overlaps in (False, True):
        engine = ToyEngine(ToyModel(1), Setup(overlaps=overlaps))
        engine.submit([1, 2, 3], 9)
        engine.run()
        steps.append(engine.executor.num_steps)
    assert steps == [9, 9]


def test_control_a_wrong_prediction_shows() -> None:
    """Were the span in flight followed by itself, its position would be decided twice."""

    def stay(self: Autoregressive, span: Span) -> Span:
        return span

    model, prompts = ToyModel(2), [[1, 2, 3], [4, 5], [6, 8, 9, 10]]
    with patch.object(Autoregressive, "advance", stay):
        engine = ToyEngine(model, Setup(overlaps=True, prefix_caching=False))
        keys = [engine.submit(prompt, 12) for prompt in prompts]
        engine.run()
    right = [reference_ar(model, prompt, 12) for prompt in prompts]
    assert [engine.results[key].tokens for key in keys] != right
