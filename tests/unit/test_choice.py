"""One choice: tokens in, text out; what is counted, shown, hidden and cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.choice import Choice, PromptView
from frontend.gap import Gap
from frontend.messages import Delta, Finish, FinishReason, Timings, TokenLogprobs, Usage
from frontend.prompt_scores import PromptScores
from frontend.request import Options, Sampling, TextRequest
from frontend.sequences import sequence_of
from frontend.text_delta import TextDelta
from frontend.tokenizer import TextTokenizer
from tests.service.frontends import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return TextTokenizer(folder)


def finish(reason: FinishReason = FinishReason.LENGTH, stop_id: int | None = None) -> Finish:
    return Finish(reason, stop_id, "", Usage(), Timings())


def scored(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs((i, 0), (-i / 100, -9.0), 1) for i in ids]


def run(choice: Choice, deltas: list[Delta]) -> TextDelta:
    """All deltas added up."""
    total = TextDelta(0)
    for delta in deltas:
        shown = choice.feed(delta)
        if shown is not None:
            total.text += shown.text
            total.token_ids += shown.token_ids
            total.logprobs += shown.logprobs
            total.finish_reason = shown.finish_reason or total.finish_reason
            total.stop_reason = shown.stop_reason or total.stop_reason
    return total


def split(ids: list[int], cut: int, last: Finish) -> list[Delta]:
    return [
        Delta(0, ids[:cut], scored(ids[:cut])),
        Delta(0, ids[cut:], scored(ids[cut:]), finish=last),
    ]


def make(tokenizer: TextTokenizer, **options: object) -> Choice:
    return Choice(0, PromptView([104, 105], "hi"), tokenizer, Options(**options))


@given(cut=st.integers(0, 13), include=st.booleans())
def test_a_stop_string_cuts_text_tokens_and_logprobs(
    tokenizer: TextTokenizer, cut: int, include: bool
) -> None:
    ids = list(b"one END, two!")
    choice = make(tokenizer, stop=("END",), include_stop_str_in_output=include, logprobs=1)
    total = run(choice, split(ids, cut, finish()))
    assert total.text == ("one END" if include else "one ")
    assert total.token_ids == ids[:7]
    assert [entry.token_id for entry in total.logprobs] == ids[:7]
    assert choice.num_tokens == 7
    assert choice.matched == "END"
    assert (total.finish_reason, total.stop_reason) == ("stop", "END")


def test_a_stop_string_inside_a_token_counts_the_whole_token(tokenizer: TextTokenizer) -> None:
    ids = [258, 111]  # "hell", "o"
    choice = make(tokenizer, stop=("el",))
    assert run(choice, [Delta(0, ids)]).text == "h"
    assert choice.num_tokens == 1


def test_min_tokens_protects_from_stop_strings(tokenizer: TextTokenizer) -> None:
    ids = list(b"ababab")
    choice = make(tokenizer, stop=("ab",), sampling=Sampling(min_tokens=3))
    total = run(choice, [Delta(0, ids, finish=finish())])
    assert total.text == "abab"[:4]
    assert choice.num_tokens == 6


def test_the_stop_token_is_counted_but_not_shown(tokenizer: TextTokenizer) -> None:
    ids = [104, 105, 33]
    last = finish(FinishReason.STOP_TOKEN, 33)
    hidden = run(make(tokenizer, stop_token_ids=(33,)), [Delta(0, ids, finish=last)])
    assert (hidden.text, hidden.token_ids) == ("hi", ids)
    assert (hidden.finish_reason, hidden.stop_reason) == ("stop", 33)
    kept = make(tokenizer, stop_token_ids=(33,), include_stop_str_in_output=True)
    assert run(kept, [Delta(0, ids, finish=last)]).text == "hi!"


def test_an_end_of_sequence_has_no_stop_reason(tokenizer: TextTokenizer) -> None:
    last = finish(FinishReason.STOP_TOKEN, 260)
    total = run(make(tokenizer), [Delta(0, [104, 260], finish=last)])
    assert (total.text, total.finish_reason, total.stop_reason) == ("h", "stop", None)


def test_special_tokens_are_shown_on_demand(tokenizer: TextTokenizer) -> None:
    deltas = [Delta(0, [104, 261], finish=finish())]
    assert run(make(tokenizer), deltas).text == "h"
    assert run(make(tokenizer, skip_special_tokens=False), deltas).text == "h<|user|>"


@given(st.text("ab", max_size=8), st.integers(0, 8))
def test_held_text_comes_with_the_finish(tokenizer: TextTokenizer, text: str, cut: int) -> None:
    ids = list(text.encode())
    choice = make(tokenizer, stop=("aabb!",))
    assert run(choice, split(ids, min(cut, len(ids)), finish())).text == text


def test_echo_puts_the_scored_prompt_in_front(tokenizer: TextTokenizer) -> None:
    choice = make(tokenizer, echo=True, logprobs=1)
    shown = choice.feed(Delta(0, prompt_logprobs=scored([105])))
    assert shown is None
    total = run(choice, [Delta(0, [33], scored([33])), Delta(0, finish=finish())])
    assert total.text == "hi!"
    assert [entry.token for entry in total.logprobs] == ["h", "i", "!"]
    assert [entry.logprob for entry in total.logprobs] == [None, -1.05, -0.33]
    assert total.token_ids == [33]


@pytest.mark.parametrize(("shown", "apart"), [(1, 3), (3, 1), (0, 2), (2, 2)])
def test_alternatives_of_a_prompt_are_as_many_as_each_list_asked_for(
    tokenizer: TextTokenizer, shown: int, apart: int
) -> None:
    """The engine is asked once, for the more of both."""
    options = Options(echo=True, logprobs=shown, prompt_logprobs=apart)
    choice = Choice(0, PromptView([104, 105], "hi"), tokenizer, options)
    count = sequence_of(choice, options).prompt_logprobs
    assert count == max(shown, apart)
    entry = TokenLogprobs((105, *range(count)), (-1.0, *[-2.0] * count), 1)
    total = run(choice, [Delta(0, [33], scored([33]), prompt_logprobs=[entry], finish=finish())])
    assert [len(one.top) for one in total.logprobs[:2]] == [0, shown]
    scores = PromptScores([choice], TextRequest(prompts=("hi",), options=options))
    assert [len(one.top) for one in scores.all_of(0)] == [0, apart]


def test_scoring_alone_shows_no_generated_token(tokenizer: TextTokenizer) -> None:
    choice = make(tokenizer, echo=True, logprobs=1, sampling=Sampling(max_tokens=0))
    delta = Delta(0, [33], scored([33]), prompt_logprobs=scored([105]), finish=finish())
    total = run(choice, [delta])
    assert (total.text, total.token_ids, total.finish_reason) == ("hi", [], "length")
    assert len(total.logprobs) == 2
    assert choice.num_tokens == 0


@given(cut=st.integers(0, 9))
def test_what_follows_a_gap_is_neither_shown_nor_counted(
    tokenizer: TextTokenizer, cut: int
) -> None:
    """The suffix may end with a stop token, which then ended nothing."""
    ids = list(b"gap<tail>")
    for options in ({"logprobs": 0}, {}, {"stop": ("tail",)}, {"stop_token_ids": (62,)}):
        prompt = PromptView([104, 105], "hi", 9, Gap(3, ids[3:]))
        choice = Choice(0, prompt, tokenizer, Options(**options))
        total = run(choice, split(ids, cut, finish(FinishReason.STOP_TOKEN, 62)))
        assert (total.text, total.token_ids, choice.num_tokens) == ("gap", ids[:3], 3)
        assert [entry.token_id for entry in total.logprobs] == ids[
            : 3 if "logprobs" in options else 0
        ]
        assert (total.finish_reason, total.stop_reason) == ("length", None)


def test_a_gap_that_is_not_full_ends_as_any_text(tokenizer: TextTokenizer) -> None:
    prompt = PromptView([104, 105], "hi", 9, Gap(6, [62]))
    choice = Choice(0, prompt, tokenizer, Options(stop=("ap",)))
    total = run(choice, [Delta(0, list(b"gap!!!>"), finish=finish())])
    assert (total.text, total.finish_reason, total.stop_reason) == ("g", "stop", "ap")
    assert choice.num_tokens == 3
    early = run(
        Choice(0, prompt, tokenizer, Options()),
        [Delta(0, [33], finish=finish(FinishReason.ABORTED))],
    )
    assert (early.text, early.finish_reason) == ("!", "abort")


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("step", [1, 2, 9])
def test_offsets_are_those_of_the_text(
    tokenizer: TextTokenizer, stop: tuple[str, ...], step: int
) -> None:
    """Half characters begin where their character begins; the text has 9 characters."""
    text = "é: \N{DOLPHIN}é!é"
    ids = tokens_of(text)
    prompt = PromptView(tokens_of("Rö"), "Rö")
    choice = Choice(0, prompt, tokenizer, Options(logprobs=0, stop=stop))
    deltas = [Delta(0, ids[i : i + step], scored(ids[i : i + step])) for i in range(0, 99, step)]
    total = run(choice, [one for one in deltas if one.token_ids])
    expected = [2 + len(bytes(ids[:i]).decode(errors="ignore")) for i in range(len(ids))]
    assert [entry.offset for entry in total.logprobs] == expected
    assert expected[:3] == [2, 2, 3]
    broken = [2 + len(bytes(ids[:i]).decode(errors="replace")) for i in range(len(ids))]
    assert broken != expected, "the check would not notice characters counted per byte"


def test_offsets_of_an_echoed_prompt_skip_added_special_tokens(tokenizer: TextTokenizer) -> None:
    bos, user = 260, 261
    ids = [bos, *tokens_of("é"), user, 33]
    prompt = PromptView(ids, "é<|user|>!")
    choice = Choice(0, prompt, tokenizer, Options(logprobs=0, echo=True))
    delta = Delta(0, [65], scored([65]), prompt_logprobs=scored(ids[1:]), finish=finish())
    total = run(choice, [delta])
    assert [entry.offset for entry in total.logprobs] == [0, 0, 0, 1, 9, 10]
    assert total.text == "é<|user|>!A"


def test_prompt_scores_are_given_out_once_and_with_the_first_tokens(
    tokenizer: TextTokenizer,
) -> None:
    options = Options(prompt_logprobs=0)
    choices = [Choice(i, PromptView([104, 105], "hi"), tokenizer, options) for i in range(2)]
    scores = PromptScores(choices, TextRequest(prompts=("hi",), options=options))
    choices[0].feed(Delta(0, [65], prompt_logprobs=scored([105])))
    assert scores.take(TextDelta(0)) == []
    assert [entry.token_id for entry in scores.take(TextDelta(0, token_ids=[65]))] == [104, 105]
    assert scores.take(TextDelta(0, token_ids=[66])) == []
    assert [e.token_id for e in scores.take(TextDelta(1, finish_reason="abort"))] == [104]
    unasked = PromptScores(choices, TextRequest(prompts=("hi",), options=Options()))
    assert unasked.take(TextDelta(0, token_ids=[65])) == unasked.all_of(0) == []
