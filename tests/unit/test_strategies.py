"""The host halves of all decoding methods: what they plan, and what a decision does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.step import EMPTY_CANVAS, FULL, Canvas, Decision, Span, Update
from engine_service.core.strategy import Budget, DecodeStrategy, View
from engine_service.decoding import strategies
from engine_service.decoding.autoregressive import Autoregressive
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.decoding.full_canvas import FullCanvas
from tidemill.runtime.errors import Unsupported

MASK = 99
EVERY = [
    kind.for_model(mask_block=4, mask_token_id=MASK, logits_shift=0)
    for kind in (Autoregressive, BlockDiffusion)
]
"""The methods that cache what they commit."""
CANVAS = FullCanvas(mask_token_id=MASK, logits_shift=1)


def test_the_folder_is_the_registry() -> None:
    assert strategies() == {
        "autoregressive": Autoregressive,
        "block_diffusion": BlockDiffusion,
        "full_canvas": FullCanvas,
    }


def test_block_diffusion_needs_a_mask_token() -> None:
    with pytest.raises(Unsupported, match="mask token"):
        BlockDiffusion.for_model(mask_block=4, mask_token_id=None, logits_shift=0)


@pytest.mark.parametrize(("mask_block", "mask_token_id"), [(4, MASK), (FULL, None)])
def test_a_full_canvas_needs_masks_and_a_model_that_sees_everything(
    mask_block: int, mask_token_id: int | None
) -> None:
    with pytest.raises(Unsupported, match="positions all see each other"):
        FullCanvas.for_model(mask_block=mask_block, mask_token_id=mask_token_id, logits_shift=0)


def start(strategy: DecodeStrategy, prompt_len: int, *, scored: bool = False) -> View:
    """A request that was just admitted."""
    params = strategy.parse({})
    canvas = strategy.begin(prompt_len, params, prompt_len + 64)
    return View(0, prompt_len, prompt_len, 0, canvas, params, 1 if scored else prompt_len)


def settle(strategy: DecodeStrategy, view: View, span: Span, decision: Decision | None) -> Update:
    """What the decision does to a request that looks like `view`."""
    return strategy.settle(view.committed_len, view.canvas, span, decision)


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
@pytest.mark.parametrize("budget", [Budget(0, 64), Budget(0, 0), Budget(-3, 64)])
def test_rule_a_without_budget_there_is_no_span(strategy: DecodeStrategy, budget: Budget) -> None:
    for prompt_len in (1, 3, 4, 9):
        assert strategy.plan(start(strategy, prompt_len), budget) is None


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
def test_the_smallest_budget_always_makes_progress(strategy: DecodeStrategy) -> None:
    budget = Budget(strategy.min_tokens_per_step, strategy.max_decide)
    view = start(strategy, 9)
    while (span := strategy.plan(view, budget)) is not None:
        assert span.start == view.num_cached
        assert span.stop > span.start
        if span.decide_stop > span.decide_start:
            break
        update = settle(strategy, view, span, None)
        assert update.num_cached == span.stop
        view = view._replace(num_cached=update.num_cached)
    assert span is not None


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
def test_without_logits_only_what_is_committed_is_computed(strategy: DecodeStrategy) -> None:
    span = strategy.plan(start(strategy, 9), Budget(64, 0))
    assert span is not None
    assert (span.start, span.stop, span.num_decided) == (0, 8, 0)
    done = start(strategy, 9)._replace(num_cached=8)
    assert strategy.plan(done, Budget(64, 0)) is None


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
@given(seed=st.integers(0, 10**6), prompt_len=st.integers(1, 20), scored=st.booleans())
def test_rule_b_a_due_decision_always_has_its_logits(
    strategy: DecodeStrategy, seed: int, prompt_len: int, scored: bool
) -> None:
    """Random budgets, prefix hits and reveals: every position is decided or scored once."""
    rng = random.Random(seed)
    scored = scored and "prompt_logprobs" in strategy.supports
    view = start(strategy, prompt_len, scored=scored)
    if not scored:
        hit = rng.randint(0, strategy.max_cached(prompt_len) // strategy.mask_block)
        view = view._replace(num_cached=hit * strategy.mask_block)
    tokens, scores = [], []
    for _ in range(400):
        assert view.num_cached <= strategy.max_cached(view.committed_len)
        budget = Budget(rng.randint(0, 12), rng.randint(0, 6))
        span = strategy.plan(view, budget)
        if span is None:
            continue
        assert span.num_tokens <= budget.tokens
        assert span.num_decided <= budget.logits
        shift = 1 if strategy.mask_block == 1 else 0
        for low, high in ((span.decide_start, span.decide_stop),):
            assert low == high or span.start <= low - shift < high - shift <= span.stop
        if span.score_stop > span.score_start:
            assert span.start <= span.score_start - 1 < span.score_stop - 1 <= span.stop
            scores += range(span.score_start, span.score_stop)
            view = view._replace(score_from=span.score_stop)
        update = settle(strategy, view, span, decide(rng, view, span))
        tokens += update.commit
        committed_len = view.committed_len + len(update.commit)
        view = view._replace(
            committed_len=committed_len, num_cached=update.num_cached, canvas=update.canvas
        )
        if len(tokens) > 12:
            break
    assert tokens == [1000 + prompt_len + i for i in range(len(tokens))]
    assert scores == (list(range(1, prompt_len)) if scored else [])


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
@pytest.mark.parametrize("scored", [False, True])
def test_advance_says_what_plan_says_after_any_decision(
    strategy: DecodeStrategy, scored: bool, seed: int
) -> None:
    rng = random.Random(seed)
    scored = scored and "prompt_logprobs" in strategy.supports
    for prompt_len in range(1, 20):
        view = start(strategy, prompt_len, scored=scored)
        for _ in range(6):
            span = strategy.plan(view, Budget(64, 64))
            assert span is not None
            ahead = strategy.advance(span)
            assert ahead is not None or not strategy.append_only
            decision = decide(rng, view, span)
            assert decision is not None
            update = settle(strategy, view, span, decision)
            if strategy.append_only:
                assert update == (decision.token_ids, decision.logprobs, span.stop, view.canvas)
            view = view._replace(
                committed_len=view.committed_len + len(update.commit),
                num_cached=update.num_cached,
                canvas=update.canvas,
                score_from=max(view.score_from, span.score_stop),
            )
            assert ahead in (None, strategy.plan(view, Budget(64, 64)))


def decide(rng: random.Random, view: View, span: Span) -> Decision | None:
    """Token 1000 + p at position p; reveals at random, at least one."""
    places = range(span.decide_start, span.decide_stop)
    if not places:
        return None
    fixed = view.canvas.fixed or (False,)
    was = [fixed[p - view.committed_len] for p in places]
    final = [done or rng.random() < 0.4 for done in was]
    final[was.index(False)] = True
    return Decision([1000 + p if f else MASK for p, f in zip(places, final, strict=True)], final)


def test_autoregression_caches_all_but_the_newest_token() -> None:
    strategy = Autoregressive()
    view = start(strategy, 5)
    span = strategy.plan(view, Budget(64, 64))
    assert span == Span(0, 0, 5, 5, 1, 5, 6)
    update = settle(strategy, view, span, Decision([42], [True]))
    assert update == ([42], None, 5, EMPTY_CANVAS)


def test_block_diffusion_commits_a_prefix_and_fuses_commit_with_open() -> None:
    strategy = BlockDiffusion(block=4, mask_token_id=MASK)
    view = start(strategy, 5)
    assert view.canvas == Canvas((MASK,) * 3, (False,) * 3)
    span = strategy.plan(view, Budget(64, 64))
    assert span == Span(0, 0, 8, 8, 4, 5, 8)
    update = settle(strategy, view, span, Decision([MASK, 12, 13], [False, True, True]))
    assert update == ([], None, 4, Canvas((MASK, 12, 13), (False, True, True), 1))
    view = view._replace(num_cached=4, canvas=update.canvas)
    span = strategy.plan(view, Budget(64, 64))
    assert span == Span(0, 4, 8, 8, 4, 5, 6)
    update = settle(strategy, view, span, Decision([11], [True]))
    assert update == ([11, 12, 13], None, 4, Canvas((MASK,) * 4, (False,) * 4))
    view = view._replace(committed_len=8, canvas=update.canvas)
    assert strategy.plan(view, Budget(64, 64)) == Span(0, 4, 12, 12, 4, 8, 12)
    assert strategy.plan(view, Budget(7, 64)) == Span(0, 4, 8, 8, 4, 8, 8)


def test_a_block_is_streamed_as_its_prefix_becomes_final() -> None:
    strategy = BlockDiffusion(block=4, mask_token_id=MASK)
    view = start(strategy, 4)
    span = strategy.plan(view, Budget(64, 64))
    assert span is not None
    update = settle(strategy, view, span, Decision([10, 11, MASK, 13], [True, True, False, True]))
    assert update.commit == [10, 11]
    assert update.canvas == Canvas((MASK, 13), (False, True), 1)


def canvas_view(knobs: dict[str, Any], *, committed: int = 5, cached: int = 0) -> View:
    """A request with 5 prompt tokens and an answer of 12, of which some are committed."""
    params = CANVAS.parse(knobs)
    canvas = CANVAS.begin(committed, params, 17)
    return View(0, 5, committed, cached, canvas, params, 5)


def test_a_full_canvas_is_computed_whole_or_not_at_all() -> None:
    view = canvas_view({"block_length": 4})
    assert CANVAS.plan(view, Budget(16, 64)) is None
    assert CANVAS.plan(view, Budget(17, 3)) is None
    assert CANVAS.plan(view, Budget(17, 4, 1)) == Span(0, 0, 17, 0, FULL, 5, 9, aside=1)
    assert CANVAS.plan(view, Budget(17, 4, 0)) is None, "other canvases took all of their share"
    assert CANVAS.needs(5, 17, view.params) == (17, 4, 0)
    dual = canvas_view({"block_length": 4, "cache": "dual"})
    assert CANVAS.needs(5, 17, dual.params) == (17, 4, 17)


def test_a_sparse_cache_chooses_its_keys_once_a_block() -> None:
    """17 positions, a block of 4: half of the 13 others are 6, and pages hold 10 slots."""
    knobs = {"block_length": 4, "cache": "sparse", "delay_step": 1, "refresh_interval": 2}
    view = canvas_view(knobs, committed=9, cached=10)
    plain = FullCanvas(mask_token_id=MASK, logits_shift=0)
    assert plain.needs(5, 17, view.params) == (17, 4, 10)
    assert CANVAS.needs(5, 17, view.params) == (17, 4, 11), "with the query ahead of the block"
    whole = Span(0, 0, 17, 10, FULL, 9, 13, aside=1)
    choosing, reusing = whole._replace(kept=6), Span(0, 9, 13, 10, FULL, 9, 13, kept=6)
    for step, wanted in enumerate((whole, choosing, reusing, choosing, reusing)):
        at = view._replace(canvas=view.canvas._replace(step=step))
        assert plain.plan(at, Budget(64, 64)) == wanted
    lost = view._replace(canvas=view.canvas._replace(step=2), num_cached=0)
    assert plain.plan(lost, Budget(64, 64)) == choosing


def test_a_cache_computes_its_block_and_the_query_ahead_of_it() -> None:
    for cache, stop in (("dual", 13), ("prefix", 17)):
        view = canvas_view({"block_length": 4, "cache": cache}, committed=9, cached=17)
        fresh = view._replace(canvas=view.canvas._replace(step=1))
        assert CANVAS.plan(view, Budget(64, 64)) == Span(0, 0, 17, 17, FULL, 9, 13)
        assert CANVAS.plan(fresh, Budget(64, 64)) == Span(0, 8, stop, 17, FULL, 9, 13)
        lost = fresh._replace(num_cached=0)
        assert CANVAS.plan(lost, Budget(64, 64)) == Span(0, 0, 17, 17, FULL, 9, 13)


def test_what_a_span_decides_anew_behind_more_than_it_knew_of_changes_nothing() -> None:
    """Positions 5 to 8 are committed since it was planned, and 9 and 10, which were pinned."""
    canvas = Canvas((MASK, MASK, 8), (False, False, True))
    span = Span(0, 0, 14, 0, FULL, 5, 9, aside=1)
    update = CANVAS.settle(11, canvas, span, Decision([1, 2, 3, 4], [True] * 4))
    assert update == Update([], None, 0, canvas)


def test_a_restart_with_a_cache_masks_the_block_again() -> None:
    fixed = (False, True, False) + (False,) * 4
    canvas = Canvas((MASK, 8, MASK) + (MASK,) * 4, fixed, 2)
    for cache, kept in (("none", (10, canvas)), ("dual", (9, Canvas((MASK,) * 8, (False,) * 8)))):
        view = canvas_view({"block_length": 4, "cache": cache})
        view = view._replace(committed_len=10, canvas=canvas, num_cached=17)
        assert CANVAS.restart(view) == kept
