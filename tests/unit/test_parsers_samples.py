"""Every sample of every format says what it says, however it is cut into pieces."""

from __future__ import annotations

import random

import pytest

from frontend.parsers.base import ToolCall
from frontend.parsers.grammar import GrammarParser, Markers, Sink, Steps
from frontend.parsers.json_calls import JsonParser
from frontend.parsers.tools.hermes import HermesParser
from frontend.parsers.tools.mistral import MistralParser
from tests.unit.parser_driver import Sample, cut, ids, in_pieces, told
from tests.unit.parser_samples import SAMPLES

ALL = [
    pytest.param(sample, id=f"{form}: {sample.name}")
    for form, samples in SAMPLES.items()
    for sample in samples
]


@pytest.mark.parametrize("sample", ALL)
def test_sample_says_what_it_says(sample: Sample) -> None:
    parsed = told(in_pieces(sample.make(), [sample.text]))
    assert [(call.name, call.arguments) for call in parsed.calls] == list(sample.calls)
    assert parsed.content == sample.content
    assert parsed.reasoning == sample.reasoning


@pytest.mark.parametrize("sample", ALL)
def test_every_split_says_the_same(sample: Sample, seed: int) -> None:
    text = sample.text
    whole = in_pieces(sample.make(), [text])
    for at in range(len(text) + 1):
        assert in_pieces(sample.make(), [text[:at], text[at:]]) == whole, at
    assert in_pieces(sample.make(), list(text)) == whole
    draw = random.Random(seed)
    for _ in range(30):
        at_random = [draw.randint(0, len(text)) for _ in range(draw.randint(2, 12))]
        assert in_pieces(sample.make(), cut(text, at_random)) == whole, at_random


@pytest.mark.parametrize("form", [form for form in SAMPLES if form != "bare"])
def test_control_without_holding_back_the_split_test_fails(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Markers that are looked for in what has come, without waiting for their rest."""

    def find_eagerly(self: Markers, text: str, start: int) -> tuple[int, str]:
        found = self._pattern.search(text, start)
        return (found.start(), found.group()) if found else (len(text), "")

    monkeypatch.setattr(Markers, "find", find_eagerly)
    failed = [
        sample.name
        for sample in SAMPLES[form]
        for at in range(len(sample.text))
        if in_pieces(sample.make(), cut(sample.text, [at]))
        != in_pieces(sample.make(), [sample.text])
    ]
    assert failed


def wrong(form: str) -> list[str]:
    """Names of the samples of a format that say something else than they should."""
    found = []
    for sample in SAMPLES[form]:
        parsed = told(in_pieces(sample.make(), [sample.text]))
        calls = tuple((call.name, call.arguments) for call in parsed.calls)
        if (parsed.content, parsed.reasoning, calls) != (
            sample.content,
            sample.reasoning,
            sample.calls,
        ):
            found.append(sample.name)
    return found


def test_control_a_parser_that_drops_what_is_no_call_loses_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drop(self: GrammarParser) -> None:
        self._held = None

    monkeypatch.setattr(GrammarParser, "_release", drop)
    assert wrong("hermes") == ["cut off in the name", "no JSON", "an opening tag twice"]


def test_control_braces_in_strings_count_for_a_parser_that_does_not_read_strings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_the_quote(self: JsonParser, put: Sink) -> Steps[bool]:
        put(self._take(1))
        yield from ()
        return True

    monkeypatch.setattr(JsonParser, "_raw_string", take_the_quote)
    assert "parallel" in wrong("hermes")


def test_arguments_are_streamed_letter_by_letter() -> None:
    parser = HermesParser((), ids())
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": "')
    for letter in "no } end yet":
        (event,) = parser.feed(letter)
        assert event == (0, letter)


def test_only_what_may_begin_a_marker_is_held_back() -> None:
    parser = HermesParser((), ids())
    assert [e.text for e in parser.feed("1 <")] == ["1"]
    assert [e.text for e in parser.feed("tool")] == []
    assert [e.text for e in parser.feed("s> ")] == [" <tools>"]
    assert [e.text for e in parser.feed("x")] == [" x"]
    assert parser.finish() == []


def test_a_call_is_announced_before_its_arguments_end() -> None:
    parser = HermesParser((), ids())
    events = parser.feed('<tool_call>{"name": "f", "arguments": {')
    assert events == [(0, "id0", "f"), (0, "{")]


@pytest.mark.parametrize("names", [("<a>", "<a>b"), ("<a>", "x<a>y")])
def test_markers_that_are_not_clear_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="begins or lies inside"):
        Markers(*names)


def test_ids_are_of_the_form_that_clients_and_templates_expect() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>' * 2
    first, second = told(in_pieces(HermesParser(), [text])).calls
    assert first.id != second.id
    assert first.id.startswith("call_")
    (call,) = told(in_pieces(MistralParser(), ["[TOOL_CALLS]f{}"])).calls
    assert len(call.id) == 9
    assert call.id.isalnum()
    text = "[TOOL_CALLS]f[CALL_ID]aB3dE5gH7[ARGS]{}"
    assert told(in_pieces(MistralParser(), [text])).calls == [ToolCall("aB3dE5gH7", "f", "{}")]
