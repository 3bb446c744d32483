"""Items of a response and blocks of a message say the same however the text of an answer came:
token by token, or with the end of a call and what is said behind it in one delta."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from frontend.api.anthropic_blocks import Blocks
from frontend.api.responses_items import Items
from frontend.parsers.base import Content, Reasoning
from frontend.parsers.registry import output_format
from frontend.reading import CallDelta, Reading, reading_of
from frontend.request import Chat
from frontend.text_delta import TextDelta, TextLogprob

SAID = (
    "<think>\nhm\n</think>\n\nFirst."
    '<tool_call>\n{"name": "f", "arguments": {"a": "hello"}}\n</tool_call>\nI called f.'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\nAnd g.'
)
ITEMS = [
    ("reasoning", "hm"),
    ("message", "First."),
    ("function_call", "f", {"a": "hello"}),
    ("message", "I called f."),
    ("function_call", "g", {}),
    ("message", "And g."),
]


def reader() -> Reading:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
    form = output_format("hermes", "qwen3", "")
    found = reading_of(Chat(messages=[], tools=tools), form, "")
    assert found is not None
    return found


def deltas(cuts: list[int]) -> list[TextDelta]:
    """The answer, cut at these places."""
    reading, found = reader(), []
    stops = [*cuts, len(SAID)]
    for start, stop in zip([0, *cuts], stops, strict=True):
        said = reading.read(SAID[start:stop], is_last=stop == stops[-1])
        text, reasoning, calls, parts = said
        delta = TextDelta(0, text=text, reasoning=reasoning, calls=calls, parts=parts)
        assert delta.text == "".join(part.text for part in parts if isinstance(part, Content))
        found.append(delta)
    return found


def items_of(found: list[TextDelta]) -> list[tuple[Any, ...]]:
    items, told = Items("x"), []

    def emit(kind: str, **fields: Any) -> bytes:
        told.append((kind, fields))
        return b"."

    for delta in found:
        items.feed(delta, emit)
    items.close("completed", emit)
    opened = [at["item"]["id"] for kind, at in told if kind.endswith("item.added")]
    assert len(opened) == len(set(opened)) == len(items.output)
    shown: list[tuple[Any, ...]] = []
    for item in items.output:
        if item["type"] == "function_call":
            shown.append((item["type"], item["name"], json.loads(item["arguments"])))
        else:
            shown.append((item["type"], item["content"][0]["text"].strip()))
    return shown


def blocks_of(found: list[TextDelta]) -> list[tuple[Any, ...]]:
    blocks, shown = Blocks(tells_thinking=True), list[tuple[Any, ...]]()
    for delta in found:
        blocks.feed(delta)
    blocks.close()
    for block in blocks.content:
        if block["type"] == "tool_use":
            shown.append(("function_call", block["name"], block["input"]))
        else:
            kind = {"thinking": "reasoning", "text": "message"}[block["type"]]
            shown.append((kind, block[block["type"]].strip()))
    return shown


@pytest.mark.parametrize("of", [items_of, blocks_of])
def test_the_order_is_that_of_the_answer(of: Any, seed: int) -> None:
    rng = random.Random(seed)
    assert of(deltas([])) == ITEMS, "in one piece"
    assert of(deltas(list(range(1, len(SAID))))) == ITEMS, "by characters"
    for count in range(1, 60):
        cuts = sorted(rng.sample(range(1, len(SAID)), 1 + count % 12))
        assert of(deltas(cuts)) == ITEMS, cuts


def test_by_kind_alone_the_end_of_a_call_would_come_behind_the_text() -> None:
    """Control: one of these deltas ends a call and goes on in text."""
    halves = deltas([SAID.index("llo")])
    assert [type(part).__name__ for part in halves[1].in_order()] == [
        "CallDelta",
        "Content",
        "CallDelta",
        "Content",
    ]
    for delta in halves:
        delta.parts = [Reasoning(delta.reasoning), Content(delta.text), *delta.calls]
    assert blocks_of(halves) != ITEMS
    with pytest.raises(KeyError):
        items_of(halves)


def test_text_behind_a_call_keeps_its_scores() -> None:
    entry = TextLogprob(1, "a", b"a", -1.0, 1)
    delta = TextDelta(0, logprobs=[entry, entry])
    items = Items("x")
    for parts in ([CallDelta(0, "i", "f"), Content("done")], [CallDelta(0, "i", "f")]):
        delta.parts = list(parts)
        items.feed(delta, lambda *_, **__: b"")
    items.close("completed", lambda *_, **__: b"")
    message = next(one for one in items.output if one["type"] == "message")
    assert len(message["content"][0]["logprobs"]) == 2
