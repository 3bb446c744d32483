"""The content of a message as Anthropic's blocks, while it is written and whole.

It does not know requests or connections.
"""

from __future__ import annotations

from typing import Any

import orjson

from frontend.api.openai_tools import INVALID_JSON
from frontend.api.sse import named_event
from frontend.parsers.base import Content
from frontend.reading import CallDelta
from frontend.text_delta import TextDelta
from tidemill.nesting import is_too_deep

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def message_event(kind: str, **content: Any) -> bytes:
    """One event of a streamed message."""
    return named_event(kind, {"type": kind, **content})


class Blocks:
    """Thinking, text and tool calls, each a block of its own, in the order in which they came."""

    def __init__(self, *, tells_thinking: bool) -> None:
        self._tells_thinking = tells_thinking
        self._blocks: list[dict[str, Any]] = []
        self._parts: list[str] = []  # of the block that is open

    def feed(self, delta: TextDelta) -> bytes:
        """Adds what is new; returns the events that tell it."""
        events = b""
        for part in delta.in_order():
            if isinstance(part, CallDelta):
                events += self._call(part)
            elif isinstance(part, Content):
                events += self._write("text", part.text)
            elif self._tells_thinking:
                events += self._write("thinking", part.text)
        return events

    def close(self) -> bytes:
        """Ends the last block; an answer without any is an empty text."""
        opened = b"" if self._blocks else self._open({"type": "text", "text": ""})
        return opened + self._end()

    @property
    def content(self) -> list[dict[str, Any]]:
        """All blocks, once they are closed."""
        return self._blocks

    def _write(self, kind: str, text: str) -> bytes:
        opened = b""
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            opened = self._end() + self._open({"type": kind, kind: "", **signed})
        self._parts.append(text)
        name, field = _DELTAS[kind]
        return opened + self._delta(type=name, **{field: text})

    def _call(self, call: CallDelta) -> bytes:
        events = b""
        if call.name:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events += self._end() + self._open(block)
        if call.arguments:
            self._parts.append(call.arguments)
            events += self._delta(type="input_json_delta", partial_json=call.arguments)
        return events

    def _open(self, block: dict[str, Any]) -> bytes:
        self._blocks.append(block)
        index = len(self._blocks) - 1
        return message_event("content_block_start", index=index, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        index = len(self._blocks) - 1
        return message_event("content_block_delta", index=index, delta=delta)

    def _end(self) -> bytes:
        """Ends the block that is open, if one is."""
        if not self._blocks:
            return b""
        block, text = self._blocks[-1], "".join(self._parts)
        self._parts = []
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        return message_event("content_block_stop", index=len(self._blocks) - 1)


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. What is no object (it was cut off) is told as it stands, under the
    name that Anthropic's documentation gives it. So is what nests too deeply to be written again,
    or to be sent back: a model that repeats itself may write hundreds of brackets."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    is_told = isinstance(arguments, dict) and not is_too_deep(arguments)
    return arguments if is_told else {INVALID_JSON: text}
