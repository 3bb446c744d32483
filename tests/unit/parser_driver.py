"""Runs output parsers over pieces, and says what a sample of an output is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

from frontend.parsers.base import Event, OutputParser, Parsed, ToolSpec
from frontend.parsers.grammar import GrammarParser

TOOLS = (
    ToolSpec(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
        },
    ),
    ToolSpec(
        "area",
        {
            "type": "object",
            "properties": {
                "shape": {"type": "string"},
                "size": {"type": "object"},
                "precision": {"type": "integer"},
                "exact": {"type": "boolean"},
                "scale": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "note": {"type": ["string", "null"]},
                "points": {"type": "array"},
            },
        },
    ),
    ToolSpec("now", {"type": "object", "properties": {}}),
)

Call = tuple[str, str]
"""Name, and the arguments' text to the letter."""


class Sample(NamedTuple):
    """An output and what it says."""

    name: str
    make: Callable[[], OutputParser]
    text: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


def ids() -> Callable[[], str]:
    """Ids that count, so that two runs give the same."""
    numbers = count()
    return lambda: f"id{next(numbers)}"


def of(kind: type[GrammarParser]) -> Callable[[], OutputParser]:
    return lambda: kind(TOOLS, ids())


def joined(events: Sequence[Event]) -> list[Event]:
    """Events with neighbours of one kind, and of one call, joined."""
    result: list[Event] = []
    for event in events:
        last: Any = result[-1] if result else None
        if type(last) is type(event) and hasattr(event, "text") and last[:-1] == event[:-1]:
            result[-1] = last._replace(text=last.text + event.text)
        else:
            result.append(event)
    return result


def in_pieces(parser: OutputParser, pieces: Sequence[str]) -> list[Event]:
    """All events of an output that comes in these pieces, joined."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def told(events: Sequence[Event]) -> Parsed:
    parsed = Parsed()
    parsed.add(events)
    return parsed


def cut(text: str, at: Sequence[int]) -> list[str]:
    """The text in pieces that end at these places."""
    edges = [0, *sorted(min(place, len(text)) for place in at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]
