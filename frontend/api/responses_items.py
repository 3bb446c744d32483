"""The output of a response: reasoning, messages and calls, while they are written and whole.

It does not know requests or connections.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from frontend.api.openai_response import chat_logprobs
from frontend.api.openai_tools import INVALID_JSON, as_object
from frontend.parsers.base import Content, Event, Reasoning
from frontend.parsers.free_input import INPUT, FreeInputParser
from frontend.reading import CallDelta, Part
from frontend.text_delta import TextDelta, TextLogprob
from tidemill.nesting import is_too_deep

Emit = Callable[..., bytes]
"""`emit(type, **fields)` is one event; a response that nobody watches emits nothing."""
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_GIVEN = {"function_call": "arguments", "custom_tool_call": "input"}
"""What a call's tool is given, by the type of the item."""
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class Items:
    """Items in the order in which they came; only the last one may be open."""

    def __init__(self, suffix: str, custom: Container[str | None] = ()) -> None:
        """`suffix` is what the ids of the items end with, `custom` names tools of free form."""
        self._suffix = suffix
        self._custom = custom
        self._input: FreeInputParser | None = None  # of the call that is open, if it is of these
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._parts: list[str] = []  # of the item that is open
        self._logprobs: list[dict[str, Any]] = []
        self._unplaced: list[dict[str, Any]] = []  # of tokens that are not told yet

    @property
    def output(self) -> list[dict[str, Any]]:
        """All items, once they are closed."""
        return self._items

    def feed(self, delta: TextDelta, emit: Emit) -> bytes:
        """Adds what is new; returns the events that tell it."""
        return b"".join([self._add(*one, emit) for one in delta.singly()])

    def _add(self, logprobs: list[TextLogprob], parts: list[Part], emit: Emit) -> bytes:
        """Reasoning and calls have no place for log-probabilities."""
        self._unplaced += chat_logprobs(logprobs)["content"]
        events = b""
        for part in parts:
            if isinstance(part, Content):
                events += self._say(part.text, emit)
            elif isinstance(part, Reasoning):
                self._unplaced = []
                events += self._think(part, emit)
            else:
                events += self._call(part, emit)
        if parts and not isinstance(parts[-1], Content):
            self._unplaced = []
        return events

    def close(self, status: str, emit: Emit) -> bytes:
        """Ends the last item, `completed` or `incomplete`; an answer without any is an empty
        message."""
        events = b""
        if not self._items or (self._unplaced and self._items[-1]["type"] == "message"):
            events += self._say("", emit)
        return events + self._end(status, emit)

    def turn(self) -> dict[str, Any]:
        """The output as a message for chat templates, which drop the reasoning where it is old:
        behind a call it is what the model goes on from."""
        turn: dict[str, Any] = {"role": "assistant", "content": self._texts("message")}
        thoughts = self._texts("reasoning")
        if thoughts:
            turn["reasoning_content"] = thoughts
        calls = [one for one in self._items if one["type"] in _GIVEN]
        if calls:
            turn["tool_calls"] = [
                {
                    "id": call["call_id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": _arguments(call)},
                }
                for call in calls
            ]
        return turn

    def _texts(self, kind: str) -> str:
        return "".join([one["content"][0]["text"] for one in self._items if one["type"] == kind])

    def _say(self, text: str, emit: Emit) -> bytes:
        opened = self._open({"type": "message", "role": "assistant", "content": []}, emit)
        logprobs, self._unplaced = self._unplaced, []
        self._parts.append(text)
        self._logprobs += logprobs
        if not (text or logprobs):
            return opened
        told = self._told(emit, "response.output_text.delta", delta=text, logprobs=logprobs)
        return opened + told

    def _think(self, reasoning: Reasoning, emit: Emit) -> bytes:
        opened = self._open({"type": "reasoning", "summary": [], "content": []}, emit)
        self._parts.append(reasoning.text)
        return opened + self._told(emit, "response.reasoning_text.delta", delta=reasoning.text)

    def _call(self, call: CallDelta, emit: Emit) -> bytes:
        events = b""
        if call.name:
            is_custom = call.name in self._custom
            kind = "custom_tool_call" if is_custom else "function_call"
            begun = {"type": kind, "call_id": call.id, "name": call.name, _GIVEN[kind]: ""}
            events += self._open(begun, emit)
            self._input = FreeInputParser() if is_custom else None
        if self._input is None:
            return events + self._give(call.arguments, emit)
        return events + self._give(_text(self._input.feed(call.arguments)), emit)

    def _give(self, text: str, emit: Emit) -> bytes:
        """More of what the open call's tool is given."""
        if not text:
            return b""
        self._parts.append(text)
        kind = self._items[-1]["type"]
        return self._told(emit, f"response.{kind}_{_GIVEN[kind]}.delta", delta=text)

    def _open(self, item: dict[str, Any], emit: Emit) -> bytes:
        """Begins an item, unless one of its type is open that can go on."""
        kind = item["type"]
        if self._is_open and self._items[-1]["type"] == kind and kind in _PARTS:
            return b""
        ended = self._end("completed", emit)
        name = f"{_PREFIXES[kind]}_{self._suffix}_{len(self._items)}"
        self._items.append({"id": name, **item, "status": "in_progress"})
        self._is_open = True
        place = {"output_index": len(self._items) - 1, "item": self._items[-1]}
        added = emit("response.output_item.added", **place)
        if kind in _PARTS:
            added += self._told(emit, "response.content_part.added", part=self._part())
        return ended + added

    def _end(self, status: str, emit: Emit) -> bytes:
        """Ends the item that is open, if one is."""
        if not self._is_open:
            return b""
        item = self._items[-1]
        item["status"] = status
        if item["type"] in _GIVEN:
            events = self._end_call(item, emit)
        else:
            part, text = self._part(), "".join(self._parts)
            item["content"] = [part]
            scores = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            events = self._told(emit, f"response.{part['type']}.done", text=text, **scores)
            events += self._told(emit, "response.content_part.done", part=part)
        self._is_open, self._parts, self._logprobs = False, [], []
        place = {"output_index": len(self._items) - 1, "item": item}
        return events + emit("response.output_item.done", **place)

    def _end_call(self, item: dict[str, Any], emit: Emit) -> bytes:
        events = b""
        if self._input is not None:
            events, self._input = self._give(_text(self._input.finish()), emit), None
        field, text = _GIVEN[item["type"]], "".join(self._parts)
        item[field] = text
        named = {"name": item["name"]} if field == "arguments" else {}
        kind = f"response.{item['type']}_{field}.done"
        return events + self._told(emit, kind, **named, **{field: text})

    def _part(self) -> dict[str, Any]:
        """The content of the open item, as far as it has come."""
        text = "".join(self._parts)
        if self._items[-1]["type"] == "message":
            beside = {"annotations": [], "logprobs": self._logprobs}
            return {"type": "output_text", "text": text, **beside}
        return {"type": "reasoning_text", "text": text}

    def _told(self, emit: Emit, kind: str, **content: Any) -> bytes:
        """An event about the open item."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] in _PARTS:
            place["content_index"] = 0
        return emit(kind, **place, **content)


def _text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Templates expect an object: of a call that was cut off as much as is there, as where a client
    sends the call itself. What nests too deeply to be written again stays the text that it is."""
    if call["type"] == "custom_tool_call":
        return {INPUT: call["input"]}
    arguments = as_object(call["arguments"])
    return {INVALID_JSON: call["arguments"]} if is_too_deep(arguments) else arguments
