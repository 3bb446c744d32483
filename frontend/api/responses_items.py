"""The output of a response: reasoning, messages and calls, while they are written and whole.

It does not know requests or connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from frontend.api.openai_response import chat_logprobs
from frontend.choice import TextDelta
from frontend.reading import CallDelta

Emit = Callable[..., bytes]
"""`emit(type, **fields)` is one event; a response that nobody watches emits nothing."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class Items:
    """Items in the order in which they came; only the last one may be open."""

    def __init__(self, suffix: str) -> None:
        """`suffix` is what the ids of the items end with."""
        self._suffix = suffix
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
        """Adds what is new; returns the events that tell it. Reasoning and calls have no place for
        logprobs."""
        self._unplaced += chat_logprobs(delta.logprobs)["content"]
        events = b""
        if delta.reasoning:
            self._unplaced = []
            events += self._open({"type": "reasoning", "summary": [], "content": []}, emit)
            self._parts.append(delta.reasoning)
            events += self._told(emit, "response.reasoning_text.delta", delta=delta.reasoning)
        if delta.text:
            events += self._say(delta.text, emit)
        for call in delta.calls:
            self._unplaced = []
            events += self._call(call, emit)
        return events

    def close(self, status: str, emit: Emit) -> bytes:
        """Ends the last item, `completed` or `incomplete`; an answer without any is an empty
        message."""
        events = b""
        if not self._items or (self._unplaced and self._items[-1]["type"] == "message"):
            events += self._say("", emit)
        return events + self._end(status, emit)

    def turn(self) -> dict[str, Any]:
        """The output as a message for chat templates, without the reasoning."""
        texts = [one["content"][0]["text"] for one in self._items if one["type"] == "message"]
        turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        calls = [one for one in self._items if one["type"] == "function_call"]
        if calls:
            turn["tool_calls"] = [
                {
                    "id": call["call_id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": _loaded(call["arguments"])},
                }
                for call in calls
            ]
        return turn

    def _say(self, text: str, emit: Emit) -> bytes:
        opened = self._open({"type": "message", "role": "assistant", "content": []}, emit)
        logprobs, self._unplaced = self._unplaced, []
        self._parts.append(text)
        self._logprobs += logprobs
        if not (text or logprobs):
            return opened
        told = self._told(emit, "response.output_text.delta", delta=text, logprobs=logprobs)
        return opened + told

    def _call(self, call: CallDelta, emit: Emit) -> bytes:
        events = b""
        if call.name:
            begun = {"type": "function_call", "call_id": call.id, "name": call.name}
            events += self._open({**begun, "arguments": ""}, emit)
        if call.arguments:
            self._parts.append(call.arguments)
            kind = "response.function_call_arguments.delta"
            events += self._told(emit, kind, delta=call.arguments)
        return events

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
        item, part, text = self._items[-1], self._part(), "".join(self._parts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            events = self._told(emit, kind, name=item["name"], arguments=text)
        else:
            item["content"] = [part]
            scores = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            events = self._told(emit, f"response.{part['type']}.done", text=text, **scores)
            events += self._told(emit, "response.content_part.done", part=part)
        self._is_open, self._parts, self._logprobs = False, [], []
        place = {"output_index": len(self._items) - 1, "item": item}
        return events + emit("response.output_item.done", **place)

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


def _loaded(arguments: str) -> Any:
    """Templates expect an object; a call that was cut off stays the text that it is."""
    try:
        return orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments
