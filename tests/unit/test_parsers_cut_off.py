"""A call of tags that is cut off, anywhere, never looks like a whole one, and none of its markup
becomes text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from frontend.parsers.base import Arguments, CallBegun, Content, Event
from frontend.parsers.grammar import GrammarParser, Steps
from frontend.parsers.tagged_values import TaggedValueParser
from frontend.parsers.tools.deepseek_v32 import DeepSeekV32Parser
from frontend.parsers.tools.glm import GlmParser
from frontend.parsers.tools.minimax_m2 import MiniMaxM2Parser
from frontend.parsers.tools.qwen3_coder import Qwen3CoderParser
from tests.unit.parser_driver import cut, in_pieces, of, told
from tests.unit.test_parsers_round_trip import (
    Calls,
    dsml,
    glm,
    is_json,
    minimax_m2,
    qwen3_coder,
)

ARGUMENTS = {"shape": "<a", "size": {"w": [1, "}"]}, "precision": 12}
BEGUN = "<function=f>\n<parameter=a>\nx\n</parameter>\n"
FORMS: list[tuple[type[GrammarParser], Callable[[Calls], str], str]] = [
    (Qwen3CoderParser, qwen3_coder, "</function>"),
    (GlmParser, glm, "</tool_call>"),
    (MiniMaxM2Parser, minimax_m2, "</invoke>"),
    (DeepSeekV32Parser, dsml, "</｜DSML｜invoke>"),  # noqa: RUF001
]
"""Behind the last tag the call is whole."""


def wrong(kind: type[GrammarParser], text: str, close: str, seed: int) -> list[str]:
    """The beginnings of an output of one call that do not say what they should."""
    draw = random.Random(seed)
    found = []
    for size in range(len(text) + 1):
        told_at_once = in_pieces(of(kind)(), [text[:size]])
        at = [draw.randint(0, size) for _ in range(draw.randint(1, 5))]
        is_same = in_pieces(of(kind)(), cut(text[:size], at)) == told_at_once
        if not (is_same and is_right(told_at_once, is_whole=close in text[:size])):
            found.append(text[:size])
    return found


def is_right(events: list[Event], *, is_whole: bool) -> bool:
    parsed = told(events)
    if not parsed.calls:
        return not is_whole  # a call that did not begin is text
    (call,) = parsed.calls
    says_all = is_json(call.arguments) and json.loads(call.arguments) == ARGUMENTS
    return not parsed.content and (says_all if is_whole else not is_json(call.arguments))


@pytest.mark.parametrize(("kind", "write", "close"), FORMS)
def test_every_beginning_of_a_call_is_half_a_call(
    kind: type[GrammarParser], write: Callable[[Calls], str], close: str, seed: int
) -> None:
    text = write([("area", ARGUMENTS)]).lstrip()
    assert wrong(kind, text, close, seed) == []


@pytest.mark.parametrize(("kind", "write", "close"), FORMS)
def test_control_a_parser_that_closes_what_is_cut_off_is_found(
    kind: type[GrammarParser],
    write: Callable[[Calls], str],
    close: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def close_at_once(self: TaggedValueParser, lead: str, *tags: str) -> Steps[None]:
        yield from ()
        self._end_arguments(lead)

    monkeypatch.setattr(TaggedValueParser, "_close", close_at_once)
    text = write([("area", ARGUMENTS)]).lstrip()
    assert wrong(kind, text, close, seed)


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        (Qwen3CoderParser, f"{BEGUN}<param", '{"a": "x"'),
        (Qwen3CoderParser, f"{BEGUN}<parameter=b", '{"a": "x"'),
        (Qwen3CoderParser, f"{BEGUN}</function>\n</tool", '{"a": "x"}'),
        (GlmParser, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_val", ""),
        (GlmParser, "<tool_call>f\n<arg_key>a</arg", ""),
        (MiniMaxM2Parser, '<invoke name="f"><parameter na', ""),
    ],
)
def test_half_a_tag_says_nothing(kind: type[GrammarParser], text: str, arguments: str) -> None:
    parsed = told(in_pieces(of(kind)(), [text]))
    assert [call.arguments for call in parsed.calls] == [arguments]
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("kind", "text", "content"),
    [
        (Qwen3CoderParser, "<function=f>\n<parameter=a<", None),
        (Qwen3CoderParser, "<function=f>\n<parameter=a<b", "<parameter=a<b"),
        (Qwen3CoderParser, "<function=f>\n<param x", "<param x"),
        (GlmParser, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_x", "<arg_key>a</arg_key>\n<arg_x"),
        (GlmParser, "<tool_call>f\n<arg_key>a</tool_call>", "<arg_key>a</tool_call>"),
        (MiniMaxM2Parser, '<invoke name="f"><parameter a="b">c', '<parameter a="b">c'),
        (MiniMaxM2Parser, '<invoke name="f"></invoke> </x', "</x"),
    ],
)
def test_what_is_no_tag_is_text_behind_the_whole_call(
    kind: type[GrammarParser], text: str, content: str | None
) -> None:
    events = in_pieces(of(kind)(), [text])
    begun = CallBegun(0, "id0", "f")
    expected = [begun] if content is None else [begun, Arguments(0, "{}"), Content(content)]
    assert events == expected
    assert in_pieces(of(kind)(), list(text)) == expected
