"""An end of sequence ends a request where it stands: the same text, by fewer forward passes."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest

from engine_service.core import scheduler
from engine_service.core.finish import Stop, find_stop
from engine_service.core.messages import FinishReason
from engine_service.core.step import Canvas, Decision, Span, Update
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.decoding.tail import merge
from tests.equivalence.harness import AR, BLOCK, EOS, Result, Setup, ToyEngine
from tests.equivalence.references import random_prompt
from tests.fakes import MASK, ToyModel

METHODS = [AR, BLOCK]
SIZE = 8


class Hasty(BlockDiffusion):
    """Ends at an EOS that stands, over positions ahead of it that are open still."""

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        if decision is not None:
            said = list(zip(decision.token_ids, decision.final, strict=True))
            if (EOS, True) in said:
                end = said.index((EOS, True))
                final = [at <= end or flag for at, flag in enumerate(decision.final)]
                decision = decision._replace(final=final)
        return super().settle(committed_len, canvas, span, decision)


class Lazy(BlockDiffusion):
    """Commits whole blocks only, so that an end is seen when its block is full."""

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        update = super().settle(committed_len, canvas, span, decision)
        if decision is None or not update.commit:
            return update
        tail = merge(committed_len, canvas, span, decision)
        if tail.num_final == len(tail.token_ids):
            return update
        return update._replace(commit=[], canvas=tail._replace(num_final=0).rest(canvas.step + 1))


def toy_engine(model: ToyModel, kind: type[BlockDiffusion] = BlockDiffusion) -> ToyEngine:
    if kind is BlockDiffusion:
        return ToyEngine(model, Setup(block=SIZE))
    strategy = kind(block=SIZE, mask_token_id=MASK)
    return ToyEngine(model, Setup(block=SIZE), strategies={BLOCK: strategy}, default_method=BLOCK)


def pair(
    method: str, seed: int, kind: type[BlockDiffusion] = BlockDiffusion, **early_options: Any
) -> tuple[Result, Result]:
    """What an engine says that ends at EOS, and what one says that goes on."""
    model, prompt = ToyModel(seed), random_prompt(random.Random(seed), 1, 12)
    model.head[EOS] += 0.8 * model.head.std()
    knobs = {"threshold": 0.5} if method == BLOCK else {}
    whole, early = toy_engine(model), toy_engine(model, kind)
    whole.submit(prompt, 40, method, knobs)
    early.submit(prompt, 40, method, knobs, **{"ignore_eos": False, **early_options})
    whole.run()
    early.run()
    return early.results[1], whole.results[1]


def check(early: Result, whole: Result) -> None:
    """The same text up to EOS, nothing behind it, and no more forward passes."""
    tokens, finish = early.tokens, early.finish
    assert tokens == whole.tokens[: len(tokens)], "the text differs"
    assert finish.usage.forward_passes <= whole.finish.usage.forward_passes
    if EOS in whole.tokens:
        assert tokens.index(EOS) == len(tokens) - 1, "it does not end at EOS"
        assert finish.reason == FinishReason.STOP_TOKEN
        assert finish.stop_token_id == EOS
    else:
        assert finish.reason == FinishReason.LENGTH


def check_all(pairs: list[tuple[Result, Result]]) -> None:
    for early, whole in pairs:
        check(early, whole)


@pytest.mark.parametrize("method", METHODS)
def test_eos_ends_a_request_early_with_the_same_text(method: str, seed: int) -> None:
    num_inside = num_saved = 0
    for round_seed in range(seed, seed + 24):
        early, whole = pair(method, round_seed)
        check(early, whole)
        if EOS in whole.tokens:
            num_inside += (len(early.prompt) + len(early.tokens)) % SIZE != 0
            passes = [one.finish.usage.forward_passes for one in (early, whole)]
            num_saved += passes[0] < passes[1]
    assert num_inside > 0, "no request ended inside a block"
    assert num_saved > 0, "no request saved a forward pass"


def test_control_an_end_over_open_positions_shows() -> None:
    pairs = [pair(BLOCK, number, Hasty) for number in range(12)]
    with pytest.raises(AssertionError, match="the text differs"):
        check_all(pairs)


def one_late(committed: list[int], prompt_len: int, run: list[int], sampling: Any) -> Stop | None:
    """Takes one token more where the run has one."""
    stop = find_stop(committed, prompt_len, run, sampling)
    return stop and stop._replace(keep=min(stop.keep + 1, len(run)))


def test_control_a_token_behind_the_end_shows() -> None:
    with patch.object(scheduler, "find_stop", one_late):
        pairs = [pair(BLOCK, number) for number in range(12)]
    with pytest.raises(AssertionError, match="it does not end at EOS"):
        check_all(pairs)


@pytest.mark.parametrize("method", METHODS)
def test_control_an_end_that_is_missed_shows(method: str) -> None:
    pairs = [pair(method, number, ignore_eos=True) for number in range(12)]
    with pytest.raises(AssertionError, match="it does not end at EOS"):
        check_all(pairs)


def passes_of_one_token(kind: type[BlockDiffusion]) -> tuple[int, int]:
    """Forward passes of a block, and of what ends behind the token at its left end."""
    engine = toy_engine(ToyModel(0), kind)
    knobs = {"remasking": "sequential", "steps": SIZE}
    whole = engine.submit([1] * SIZE, SIZE, BLOCK, knobs)
    engine.run()
    first = engine.results[whole].tokens[0]
    early = engine.submit([1] * SIZE, SIZE, BLOCK, knobs, stop_token_ids=(first,))
    engine.run()
    assert engine.results[early].tokens == [first]
    passes = [engine.results[key].finish.usage.forward_passes for key in (whole, early)]
    return passes[0], passes[1]


def test_early_exit_inside_a_block_saves_forward_passes() -> None:
    """The first token revealed at the left end of the block is EOS: one pass is enough."""
    assert passes_of_one_token(BlockDiffusion) == (SIZE, 1)


def test_control_an_end_seen_in_full_blocks_only_saves_nothing() -> None:
    assert passes_of_one_token(Lazy) == (SIZE, SIZE)
