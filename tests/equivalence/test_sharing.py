"""Prefix sharing changes no token, and each of its rules fails a test when it is broken."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

from engine_service.core.page_table import PageTable
from engine_service.core.pages import Match, PageManager
from tests.equivalence.harness import AR, BLOCK, Setup, ToyEngine
from tests.equivalence.references import random_prompt, reference_ar, reference_block
from tests.fakes import ToyModel

SIZES = ((4, 8), (8, 4), (4, 4), (2, 8))
"""(page, block)."""


def share_twelve_tokens(num_rounds: int, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Requests one after the other that share 12 tokens: (wrong ones, tokens from the cache)."""
    num_wrong = num_cached = 0
    for seed in range(num_rounds):
        rng, model = random.Random(seed), ToyModel(seed)
        head, one, other = (random_prompt(rng, n, n) for n in (12, 9, 9))
        for page_size, block in sizes:
            engine = ToyEngine(model, Setup(page_size=page_size, block=block))
            for prompt in (head + one, head + other, [*head, *other, 1]):
                key = engine.submit(prompt, 12, BLOCK, {"threshold": 0.6})
                engine.run()
                result = engine.results[key]
                reference = reference_block(model, prompt, 12, block, {"threshold": 0.6})
                num_wrong += result.tokens != reference
                num_cached += result.finish.usage.cached_tokens
    return num_wrong, num_cached


def test_rule_g_pages_smaller_than_a_block_are_shared_by_whole_blocks() -> None:
    num_wrong, num_cached = share_twelve_tokens(4, SIZES)
    assert num_wrong == 0
    assert num_cached >= 4 * len(SIZES) * (8 + 16)


def test_rule_g_control_keys_per_page_give_wrong_tokens() -> None:
    """Per-page keys find half a block of one request and half of another under one prefix."""
    real_open, real_match = PageManager.open, PageManager.match

    def open_per_page(self: PageManager, mask_block: int, salt: str = "") -> PageTable:
        table = real_open(self, mask_block, salt)
        table.unit, table.pages_per_unit = self.page_size, 1
        return table

    def match_pairs(self: PageManager, table: PageTable, tokens: list[int], limit: int) -> Match:
        match = real_match(self, table, tokens, limit)
        return match._replace(pages=match.pages[: len(match.pages) // 2 * 2])

    with (
        patch.object(PageManager, "open", open_per_page),
        patch.object(PageManager, "match", match_pairs),
    ):
        num_wrong, _ = share_twelve_tokens(8, ((4, 8),))
    assert num_wrong > 0


@pytest.mark.parametrize("method", [AR, BLOCK])
def test_rule_h_shared_pages_are_never_written(method: str, seed: int) -> None:
    """A written page is poisoned or raises; the harness checks holders after every step."""
    rng, model = random.Random(seed), ToyModel(seed)
    engine = ToyEngine(model, Setup(max_rows=6))
    prompt = random_prompt(rng, 16, 16)
    keys = [engine.submit(prompt, 9, method) for _ in range(6)]
    engine.run()
    reference = (
        reference_ar(model, prompt, 9) if method == AR else reference_block(model, prompt, 9, 4, {})
    )
    assert [engine.results[key].tokens for key in keys] == [reference] * 6
    hits = [engine.results[key].finish.usage.cached_tokens for key in keys]
    # Autoregression computes the last token again, so its page is not shared.
    assert sorted(hits) == [0] + [12 if method == AR else 16] * 5


def test_rule_h_control_sealing_pages_that_will_be_written_is_caught() -> None:
    real_seal = PageManager.seal

    def seal_early(self: PageManager, table, tokens, num_cached):  # type: ignore[no-untyped-def]
        real_seal(self, table, tokens, len(tokens))

    engine = ToyEngine(ToyModel(0), Setup())
    engine.submit([1] * 8, 9, BLOCK)
    with (
        patch.object(PageManager, "seal", seal_early),
        pytest.raises(AssertionError, match="is written while it is in the index"),
    ):
        engine.run()


@pytest.mark.parametrize("method", [AR, BLOCK])
def test_rule_i_a_burst_computes_a_shared_prompt_once(method: str) -> None:
    prompt = [3 + n % 30 for n in range(32)]
    assert prefill_tokens(method, prompt) < 2 * len(prompt)


@pytest.mark.parametrize("method", [AR, BLOCK])
def test_rule_i_control_without_claims_every_child_prefills(method: str) -> None:
    with patch.object(PageManager, "claim", lambda *_: None):
        assert prefill_tokens(method, [3 + n % 30 for n in range(32)]) >= 4 * 32


def prefill_tokens(method: str, prompt: list[int]) -> int:
    """Query tokens below the end of the prompt, for four children that arrive together."""
    engine = ToyEngine(ToyModel(2), Setup(max_rows=4, token_budget=256, logit_budget=256))
    for _ in range(4):
        engine.submit(prompt, 4, method)
    engine.run()
    return sum(
        min(span.stop, len(prompt)) - span.start
        for plan in engine.plans
        for span in plan.spans
        if span.start < len(prompt)
    )


def test_a_claim_ends_with_its_holder() -> None:
    """The request that computes a shared prefix is aborted: the waiting one takes over."""
    engine = ToyEngine(ToyModel(2), Setup(token_budget=4))
    prompt = [3 + n % 30 for n in range(32)]
    first = engine.submit(prompt, 4, AR)
    second = engine.submit(prompt, 4, AR)
    engine.step()
    engine.step()
    assert {span.row for span in engine.plans[-1].spans} == {0}
    engine.abort(first)
    engine.run()
    assert engine.results[second].tokens == reference_ar(ToyModel(2), prompt, 4)
    assert engine.results[second].finish.usage.cached_tokens == 8


def test_salts_and_mask_blocks_keep_prefixes_apart() -> None:
    engine = ToyEngine(ToyModel(5), Setup(page_size=4, block=4))
    prompt = [3 + n % 30 for n in range(20)]
    cases = [(AR, ""), (AR, "a"), (BLOCK, ""), (BLOCK, "a"), (AR, ""), (BLOCK, "a")]
    for method, salt in cases:
        engine.submit(prompt, 3, method, cache_salt=salt)
        engine.run()
    cached = [result.finish.usage.cached_tokens for result in engine.results.values()]
    assert cached == [0, 0, 0, 0, 16, 20]


def test_a_follow_up_turn_reuses_prompt_and_answer() -> None:
    model = ToyModel(6)
    engine = ToyEngine(model, Setup(page_size=4, block=4))
    first = engine.submit([1, 2, 3, 4, 5], 16, AR)
    engine.run()
    turn = [1, 2, 3, 4, 5, *engine.results[first].tokens, 9, 9]
    second = engine.submit(turn, 5, AR)
    engine.run()
    assert engine.results[second].finish.usage.cached_tokens == 20
    assert engine.results[second].tokens == reference_ar(model, turn, 5)
