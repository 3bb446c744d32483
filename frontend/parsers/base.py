"""What a model's output says, as typed events: the interface of every output parser.

It does not know formats (tools/, reasoning/), tokens or the faces.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class CallBegun(NamedTuple):
    """The tool call number `call` of this output (from 0) begins; its arguments follow."""

    call: int
    id: str
    name: str


class Arguments(NamedTuple):
    """More of the JSON text of a call's arguments, as the model wrote it."""

    call: int
    text: str


class Span(NamedTuple):
    """Characters of an output, counted from its beginning; `end` is behind the last one."""

    start: int
    end: int


Event = Content | Reasoning | CallBegun | Arguments


class ToolSpec(NamedTuple):
    """A tool that the client offers; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


class OutputParser(Protocol):
    """One output, fed piece by piece. However it is cut, the events say the same: joined by kind
    and call they are equal. No text raises: what turns out to be no call is content, and a call
    that is cut off keeps the part of its arguments that came.
    """

    def feed(self, text: str) -> list[Event]:
        """What became certain with this text; what may still begin a marker is held back."""
        ...

    def finish(self) -> list[Event]:
        """What is left, when the output has ended. Call once, last."""
        ...

    @property
    def reasoned(self) -> Sequence[Span]:
        """Where in the text up to now the reasoning stands, in order."""
        ...


@dataclass(slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text, broken where the output was cut off."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """A whole output, taken apart. Empty text: there was none."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Joins events of one output, in their order."""
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallBegun):
                self.calls.append(ToolCall(event.id, event.name))
            else:
                self.calls[event.call].arguments += event.text


def parse_whole(parser: OutputParser, text: str) -> Parsed:
    """All of an output at once."""
    parsed = Parsed()
    parsed.add(parser.feed(text))
    parsed.add(parser.finish())
    return parsed


def new_call_id() -> str:
    """An id for a call, in OpenAI's shape."""
    return f"call_{uuid.uuid4().hex[:24]}"
