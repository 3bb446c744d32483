"""A gap before a suffix: what it takes of the context, and what is refused in whose words."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from frontend.gap import (
    MAX_SUFFIX_TOKENS,
    Gap,
    check_gap,
    check_suffix_ids,
    check_suffix_len,
    fit_prompt,
    of_suffix,
)
from frontend.request import Options, Sampling, TextRequest
from frontend.validation import fit
from tests.engine_facts import FACTS
from tidemill.runtime.errors import InvalidRequest, Unsupported


def ask(max_tokens: int | None = None, **fields: Any) -> TextRequest:
    options = Options(sampling=Sampling(max_tokens=max_tokens), **fields)
    return TextRequest(prompts=("a",), options=options, suffix="b")


def fitted(
    prompt_len: int, suffix_len: int, max_tokens: int, *, keep: int | None = None, default: bool = 0
) -> tuple[list[int], int | None, Gap | None]:
    options = ask(max_tokens, truncate_prompt_tokens=keep).options
    prompt, suffix = list(range(prompt_len)), list(range(100, 100 + suffix_len))
    return fit_prompt(prompt, suffix, options, FACTS, param="prompt", is_default=bool(default))


def test_a_suffix_stands_behind_the_gap() -> None:
    prompt, max_tokens, gap = fitted(5, 3, 10)
    assert (len(prompt), max_tokens) == (5, 13)
    assert gap == Gap(10, [100, 101, 102])
    assert gap.pinned(len(prompt)) == ((15, 100), (16, 101), (17, 102))


def test_without_a_suffix_nothing_changes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        options = ask(rng.choice([None, 1, 9])).options
        prompt, default = list(range(rng.randint(1, 20))), rng.random() < 0.5
        plain = fit(prompt, options, FACTS, param="prompt", is_default=default)
        assert fit_prompt(prompt, [], options, FACTS, param="prompt", is_default=default) == (
            *plain,
            None,
        )


def test_prompt_gap_and_suffix_share_the_context() -> None:
    assert fitted(12, 10, 10)[1] == 20
    with pytest.raises(
        InvalidRequest, match=r"33 tokens \(12 in the prompt, 10 in the gap, 11 in the suffix\)"
    ) as long:
        fitted(12, 11, 10)
    assert (long.value.param, long.value.reason) == ("prompt", "CONTEXT_LENGTH_EXCEEDED")
    assert long.value.facts == {"n_prompt_tokens": "12", "n_ctx": "32"}


def test_our_own_length_shrinks_to_the_room_and_a_prompt_may_be_cut() -> None:
    assert fitted(12, 10, 16, default=True)[2] == Gap(10, list(range(100, 110)))
    with pytest.raises(InvalidRequest, match="1 in the gap, 20 in the suffix"):
        fitted(12, 20, 16, default=True)
    prompt, max_tokens, gap = fitted(12, 20, 8, keep=-1)
    assert (prompt, max_tokens) == ([8, 9, 10, 11], 28)
    assert gap == Gap(8, list(range(100, 120)))
    assert fitted(12, 20, 8, keep=2)[0] == [10, 11]
    with pytest.raises(InvalidRequest, match="1 in the prompt, 12 in the gap, 20 in the suffix"):
        fitted(12, 20, 12, keep=-1)


def test_a_model_without_masks_is_named_with_what_it_knows() -> None:
    check_gap(ask(5), FACTS)
    facts = replace(FACTS, mask_token_id=None, methods=("autoregressive",))
    with pytest.raises(
        Unsupported, match=r"suffix needs a diffusion model.*autoregressive only"
    ) as one:
        check_gap(ask(5), facts)
    assert one.value.param == "suffix"
    with pytest.raises(InvalidRequest, match=r"max_tokens is 0, .* 1 or more") as none:
        check_gap(ask(0, echo=True), FACTS)
    assert none.value.param == "max_tokens"


def test_too_much_and_nothing_are_no_suffix() -> None:
    most = [5] * MAX_SUFFIX_TOKENS
    check_suffix_ids(most)
    check_suffix_len(0)
    for wrong, words in (([], "no tokens"), ([*most, 5], "4097 tokens or more; it may have 4096")):
        with pytest.raises(InvalidRequest, match=words) as refused:
            check_suffix_ids(wrong)
        assert refused.value.param == "suffix"


def test_the_engines_word_is_passed_on_under_the_clients_name() -> None:
    refused = of_suffix(Unsupported("The method 'x' does not support pinned.", param="pinned"))
    assert refused.param == "suffix"
    assert "'x' does not support" in refused.message
