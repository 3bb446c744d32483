"""Stop strings over any split of a text equal the obvious search over the whole text."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.stopping import StopChecker

ALPHABET = st.text("ab\n", max_size=14)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reads one character more at a time and looks whether the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def in_pieces(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> tuple[str, str | None]:
    checker = StopChecker(tuple(stops), include=include)
    edges = [0, *sorted(cuts), len(text)]
    shown = ""
    for a, b in pairwise(edges):
        checked = checker.feed(text[a:b])
        shown += checked.text
        if checked.matched is not None:
            return shown, checked.matched
    return shown + checker.flush(), None


@given(ALPHABET, STOPS, st.booleans())
def test_every_split_point_gives_the_reference(text: str, stops: list[str], include: bool) -> None:
    expected = reference(text, stops, include)
    for cut in range(len(text) + 1):
        assert in_pieces(text, stops, include, [cut]) == expected
    assert in_pieces(text, stops, include, list(range(len(text)))) == expected


@given(ALPHABET, STOPS, st.lists(st.integers(0, 14), max_size=6))
def test_several_cuts_give_the_reference(text: str, stops: list[str], cuts: list[int]) -> None:
    cuts = [min(cut, len(text)) for cut in cuts]
    assert in_pieces(text, stops, False, cuts) == reference(text, stops, False)


def test_control_searching_each_piece_alone_misses_a_match() -> None:
    pieces = ["end", "ing"]
    assert all("di" not in piece for piece in pieces)
    assert in_pieces("ending", ["di"], False, [3]) == ("en", "di")


@given(ALPHABET, STOPS)
def test_what_is_shown_is_never_taken_back(text: str, stops: list[str]) -> None:
    final, _ = reference(text, stops, False)
    checker = StopChecker(tuple(stops))
    shown = ""
    for letter in text:
        checked = checker.feed(letter)
        shown += checked.text
        assert final.startswith(shown)
        if checked.matched is not None:
            break


def test_nothing_is_held_when_the_stop_string_is_kept() -> None:
    assert StopChecker(("abc",), include=True).feed("xab").text == "xab"
    assert StopChecker(("abc",)).feed("xab").text == "x"


def test_only_a_possible_beginning_is_held_back() -> None:
    checker = StopChecker(("</s>", "\n\n"))
    assert checker.feed("one <").text == "one "
    assert checker.feed("b>\n").text == "<b>"
    assert checker.feed("two").text == "\ntwo"


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("abcd", "bc"), "abcd", ("a", "bc")),
        (("b", "ab"), "xab", ("x", "ab")),
        (("aa",), "baaa", ("b", "aa")),
    ],
)
def test_the_match_that_ends_first_wins_and_then_the_longest(
    stops: tuple[str, ...], text: str, expected: tuple[str, str]
) -> None:
    assert in_pieces(text, list(stops), False, []) == expected


def test_skipped_text_cannot_match_nor_begin_a_match() -> None:
    checker = StopChecker(("ab",))
    assert checker.feed("xa").text == "x"
    assert checker.skip("ab a") == "aab a"
    assert checker.feed("b") == ("b", None)
    assert checker.feed("ab") == ("", "ab")


@given(ALPHABET, ALPHABET, STOPS)
def test_what_was_skipped_begins_no_stop_string(skipped: str, text: str, stops: list[str]) -> None:
    checker = StopChecker(tuple(stops))
    shown = checker.skip(skipped)
    for character in text:
        checked = checker.feed(character)
        shown += checked.text
        if checked.matched is not None:
            break
    else:
        shown += checker.flush()
    assert shown == skipped + reference(text, stops, False)[0]


@pytest.mark.parametrize("end", ["", "b"])
def test_long_stop_strings_cost_a_token_little(end: str) -> None:
    """Streams of all clients wait meanwhile: 16 strings of 1024 characters were 9 ms a token."""
    stops = tuple("a" * (1024 - len(end) - i) + i * "b" + end for i in range(1, 17))
    checker = StopChecker(stops)
    began = time.process_time()
    for word in (*["word "] * 400, *["aaaa"] * 200):
        assert checker.feed(word).matched is None
    assert time.process_time() - began < 0.5
