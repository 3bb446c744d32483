"""LLM.infill on the built-in block-diffusion model: gaps that servers fill, and wrong values."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.test_infill import TASKS
from tidemill.llm import LLM
from tidemill.outputs import RequestOutput
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported
from tidemill.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def block() -> LLM:
    return LLM("demo-block", max_model_len=512)


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(("prefix", "suffix", "between"), TASKS)
def test_one_gap_is_filled(block: LLM, prefix: str, suffix: str, between: str) -> None:
    (output,) = block.infill(prefix, suffix, greedy(len(between)), use_tqdm=False)
    (filled,) = output.outputs
    assert (filled.text, filled.finish_reason, filled.stop_reason) == (between, "length", None)
    assert len(filled.token_ids) == output.usage.output_tokens == len(between)
    assert (output.prompt, output.usage.prompt_tokens) == (prefix, len(prefix))
    assert output.prompt_token_ids == list(prefix.encode())
    assert not block.has_unfinished_requests


def test_many_gaps_come_in_order_with_params_of_their_own(block: LLM) -> None:
    prefixes, suffixes, betweens = (list(column) for column in zip(*TASKS * 3, strict=True))
    params = [greedy(len(between)) for between in betweens]
    assert texts(block.infill(prefixes, suffixes, params, use_tqdm=False)) == betweens


def test_one_suffix_serves_all_prefixes(block: LLM) -> None:
    prefixes = ["reverse: harbour =", "reverse: seaweed ="]
    outputs = block.infill(prefixes, "\n", greedy(8), use_tqdm=False)
    assert texts(outputs) == [" ruobrah", " deewaes"]
    each = [block.infill(p, ["\n"], greedy(8), use_tqdm=False)[0] for p in prefixes]
    assert texts(each) == texts(outputs)


def test_forms_of_a_prefix_agree(block: LLM) -> None:
    prefix, suffix, between = TASKS[0]
    ids = list(prefix.encode())
    params = greedy(len(between))
    for form in (prefix, ids, [ids], {"prompt": prefix}, {"prompt_token_ids": ids}):
        assert texts(block.infill(form, suffix, params, use_tqdm=False)) == [between]
    # The same gap among ordinary prompts, and driven by the caller.
    mixed: list[Any] = [prefix, {"prompt": prefix, "suffix": suffix}]
    assert texts(block.generate(mixed, params, use_tqdm=False))[1] == between
    request_id = block.add_request({"prompt_token_ids": ids, "suffix": suffix}, params)
    while block.has_unfinished_requests:
        block.step()
    output = block.get_output(request_id)
    assert output is not None
    assert texts([output]) == [between]


def test_what_stands_behind_a_gap_changes_what_fills_it(block: LLM) -> None:
    suffixes = [f"{letter} and" for letter in "abcxyz"]
    filled = texts(block.infill(["the "] * 6, suffixes, greedy(3), use_tqdm=False))
    assert {len(text) for text in filled} == {3}
    assert len(set(filled)) > 3
    alone = block.generate("the ", greedy(3), use_tqdm=False)
    assert set(filled) != set(texts(alone))


def test_an_end_of_text_does_not_cut_a_gap(block: LLM) -> None:
    """Alone the answer ends after " 3"."""
    alone = block.generate("add: 1+2 =", greedy(12), use_tqdm=False)[0].outputs[0]
    held = block.infill("add: 1+2 =", "!", greedy(12), use_tqdm=False)[0].outputs[0]
    assert (alone.finish_reason, held.finish_reason) == ("stop", "length")
    assert len(alone.token_ids) < len(held.token_ids) == 12


def test_choices_scores_and_stop_strings_are_those_of_the_gap(block: LLM) -> None:
    prefix, suffix, between = TASKS[0]
    params = SamplingParams(temperature=1.0, seed=5, n=3, logprobs=1, max_tokens=len(between))
    first, second = (block.infill(prefix, suffix, params, use_tqdm=False)[0] for _ in range(2))
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    for choice in first.outputs:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids) == len(between)
        for token_id, table in zip(choice.token_ids, choice.logprobs, strict=True):
            assert token_id in table
    assert first.usage.output_tokens == 3 * len(between)
    stopped = block.infill(prefix, suffix, greedy(len(between), stop=" 39"), use_tqdm=False)
    (cut,) = stopped[0].outputs
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (" 37 38", "stop", " 39")


BAD: dict[str, tuple[tuple[Any, Any, SamplingParams], str, str]] = {
    "no suffix": (("a", "", greedy(3)), "suffix", "suffix is ''.*use generate"),
    "none": (("a", None, greedy(3)), "suffix", "suffix is None"),
    "ids": (("a", [1, 2], greedy(3)), "suffix", "1 prefixes but 2 suffixes"),
    "counts": ((["a", "b"], ["c"], greedy(3)), "suffix", "2 prefixes but 1 suffixes"),
    "not a text": ((["a", "b"], ["c", 5], greedy(3)), "suffix", "suffix is 5"),
    "no prefix": (("", "b", greedy(3)), "prompt", "prompt is empty"),
    "no gap": (("a", "b", greedy(0)), "max_tokens", "max_tokens is 0.*length of the gap"),
    "open gap": (("a", "b", SamplingParams(max_tokens=None)), "max_tokens", "max_tokens is None"),
    "too short": (("a", "b", greedy(3, min_tokens=4)), "min_tokens", r"is 4; .* in \[0, 3\]"),
    "negative": (("a", "b", greedy(-1)), "max_tokens", "max_tokens is -1"),
    "no room": (("abc", "de", greedy(508)), "prompt", "3 in the prompt, 508 in the gap, 2 in the"),
    "too long": (("a", "b" * 5000, greedy(3)), "suffix", "5000 tokens or more; it may have 4096"),
    "no choice": (("a", "b", greedy(3, n=0)), "n", "n is 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_values_name_their_parameter(block: LLM, name: str) -> None:
    (prefix, suffix, params), param, words = BAD[name]
    with pytest.raises(InvalidRequest, match=words) as caught:
        block.infill(prefix, suffix, params, use_tqdm=False)
    assert caught.value.param == param
    block.step()
    assert not block.has_unfinished_requests


def test_a_prompt_with_an_unknown_key_is_refused(block: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"'sufix'; it may have prompt, .*suffix"):
        block.generate({"prompt": "a", "sufix": "b"}, greedy(3), use_tqdm=False)


def test_a_model_that_only_appends_says_so() -> None:
    llm = LLM("demo", max_model_len=64)
    with pytest.raises(Unsupported, match=r"needs a diffusion model.*autoregressive") as caught:
        llm.infill("a", "b", greedy(3), use_tqdm=False)
    assert caught.value.param == "suffix"
    assert not llm.has_unfinished_requests


def test_a_suffix_is_a_text_and_needs_a_tokenizer() -> None:
    llm = LLM("demo-block", skip_tokenizer_init=True, max_model_len=64)
    with pytest.raises(ServiceError, match=r"skip_tokenizer_init.*suffix") as caught:
        llm.infill([65, 66], "b", greedy(3), use_tqdm=False)
    assert caught.value.param == "suffix"
