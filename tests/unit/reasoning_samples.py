"""Outputs with reasoning, as models write them, and what they say."""

from __future__ import annotations

from frontend.parsers.base import OutputParser
from frontend.parsers.reasoning.granite import GraniteParser
from frontend.parsers.reasoning.think import BracketThinkParser, ThinkTagsParser
from tests.unit.parser_driver import Sample


def _inside() -> OutputParser:
    return ThinkTagsParser(is_inside=True)


def _outside() -> OutputParser:
    return ThinkTagsParser()


REASONING = (
    Sample("tags", _outside, "<think>\nHm, <b>.\n</think>\n\nYes.\n", "Yes.\n",
           reasoning="Hm, <b>."),
    Sample("tag in the prompt", _inside, "Hm.\n</think>\n\nYes </think>.", "Yes </think>.",
           reasoning="Hm."),
    Sample("tag in the prompt and again", _inside, "\n<think>Hm</think>Yes", "Yes",
           reasoning="Hm"),
    Sample("no end", _inside, "Hm. </thin ", reasoning="Hm. </thin "),
    Sample("empty", _outside, "<think>\n\n</think>\n\nYes", "Yes"),
    Sample("none", _outside, "\nYes <think> no", "\nYes <think> no"),
    Sample("cut off in the tag", _outside, "<thi", "<thi"),
    Sample("brackets", BracketThinkParser, "[THINK]a [x] b[/THINK]c", "c", reasoning="a [x] b"),
    Sample(
        "granite", GraniteParser,
        "Here is my thought process: Here is one.\nHere is my response:\n\nYes.",
        "Yes.", reasoning="Here is one.",
    ),
    Sample("granite without", GraniteParser, "Here is my answer", "Here is my answer"),
)  # fmt: skip
