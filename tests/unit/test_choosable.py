"""Bad words as tokens, and the engine's refusals in the words of who asked."""

from __future__ import annotations

import pytest

from frontend.choosable import (
    MAX_BAD_WORDS,
    as_asked,
    as_restricted,
    bad_word_ids,
    with_bad_words,
)
from frontend.request import Options, Sampling
from tests.service.frontends import byte_tokenizer
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint


class Encoder:
    """The byte-level tokenizer of the service tests: `he` is one token."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def test_words_are_forbidden_with_and_without_a_space_in_front() -> None:
    encoder = Encoder()
    space, he, x = (encoder.encode(t, add_special_tokens=False) for t in (" ", "he", "x"))
    assert bad_word_ids(["hex"], encoder) == [(*he, *x), (*space, *he, *x)]
    assert bad_word_ids([" x", "x", " x"], encoder) == [(*space, *x), (*x,)]
    given = Options(bad_words=("x",), sampling=Sampling(bad_words=((9, 9),)))
    assert with_bad_words(given, encoder).sampling.bad_words == ((9, 9), (*x,), (*space, *x))
    assert with_bad_words(Options(), encoder) == Options()


@pytest.mark.parametrize("words", [[""], ["x" * 1025], ["x"] * (MAX_BAD_WORDS + 1)])
def test_wrong_words_are_named(words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bad_word_ids(words, Encoder())
    assert caught.value.param == "bad_words"


def test_refusals_name_what_the_client_wrote() -> None:
    asked = Constraint("regex", "(", "guided_regex")
    refused = InvalidRequest("no", reason="GRAMMAR_INVALID", param="constraint.regex")
    told = as_asked(refused, asked, "")
    assert isinstance(told, InvalidRequest)
    assert (told.message, told.reason, told.param) == ("no", "GRAMMAR_INVALID", "guided_regex")
    pinned = Unsupported("no gaps", param="pinned")
    assert as_asked(pinned, None, "suffix").param == "suffix"
    both = Unsupported("leave out either, pinned or constraint.regex.", param="pinned")
    assert as_asked(both, asked, "suffix").message.endswith("either, suffix or guided_regex.")
    scores = Unsupported("no prompt_logprobs", param="prompt_logprobs")
    assert as_asked(scores, None, "", echoes=True).param == "echo"
    for other in (pinned, scores, InvalidRequest("x", param="top_p"), InvalidRequest("x")):
        assert as_asked(other, asked, "") is other


def test_dead_ends_name_what_led_there() -> None:
    """They named nothing, and a client that reads `param` could not say which of its fields."""
    dead = InvalidRequest("nothing can follow", reason="GENERATION_DEAD_END")
    grammar = Constraint("regex", "a", "guided_regex")
    both = Options(constraint=grammar, sampling=Sampling(allowed_token_ids=(5,)))
    told = as_restricted(dead, both)
    assert isinstance(told, InvalidRequest)
    assert (told.reason, told.param) == ("GENERATION_DEAD_END", "guided_regex")
    assert told.message.endswith("It has guided_regex and allowed_token_ids; allow more")
    lists = Options(sampling=Sampling(bad_words=((5, 6),)))
    for options, param in ((lists, "bad_words"), (Options(constraint=grammar), "guided_regex")):
        told = as_restricted(dead, options)
        assert told is not None
        assert told.param == param
    other = InvalidRequest("x", param="top_p")
    assert as_restricted(other, both) is other
    assert as_restricted(dead, Options()) is dead
    assert as_restricted(None, both) is None
