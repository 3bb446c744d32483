"""Input items of /v1/responses as the messages that chat templates expect. It knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.api.openai_request import to_message, to_text
from frontend.api.openai_schema import Message
from frontend.api.openai_tools import with_arguments
from frontend.api.responses_schema import InputItem
from frontend.parsers.free_input import INPUT
from tidemill.runtime.errors import InvalidRequest, Unsupported

Turns = tuple[dict[str, Any], ...]
"""Messages of a conversation, as templates expect them; instructions are not among them."""


def to_turns(given: str | Sequence[InputItem], before: Turns) -> Turns:
    """The messages of `input` behind those of `before`. Raises ServiceError naming an item."""
    if isinstance(given, str):
        return (*before, {"role": "user", "content": given})
    reader = _Reader(before)
    for number, item in enumerate(given):
        reader.read(item, f"input[{number}]")
    return (*before, *reader.turns())


class _Reader:
    """Reasoning, text and calls of the assistant that follow each other are one message."""

    def __init__(self, before: Turns) -> None:
        calls = [call for turn in before for call in turn.get("tool_calls", ())]
        self._names = {call["id"]: call["function"]["name"] for call in calls}
        self._turns: list[dict[str, Any]] = []
        self._thoughts = ""

    def turns(self) -> list[dict[str, Any]]:
        """What was read."""
        return self._turns

    def read(self, item: InputItem, place: str) -> None:
        """The next item."""
        kind = item.type or "message"
        if kind == "message":
            self._add(_message(item, place))
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, place)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add(self._result(item, place))
        elif kind == "reasoning":
            self._thoughts += _thoughts(item, place)
        else:
            raise Unsupported(f"{place}: items of type {kind!r} are not served", param=place)

    def _add(self, turn: dict[str, Any]) -> None:
        if turn["role"] == "assistant" and self._thoughts:
            turn["reasoning_content"] = self._thoughts
        self._thoughts = ""
        self._turns.append(turn)

    def _call(self, item: InputItem, place: str) -> None:
        if item.call_id is None or item.name is None:
            missing = "name" if item.name is None else "call_id"
            raise InvalidRequest(f"{place}.{missing} is missing", param=f"{place}.{missing}")
        function: dict[str, Any] = {"name": item.name, "arguments": item.arguments or ""}
        call = {"id": item.call_id, "type": "function", "function": function}
        if item.type == "custom_tool_call":
            function["arguments"] = {INPUT: item.input or ""}
        else:
            call = with_arguments(call, f"{place}.arguments")
        self._names[item.call_id] = item.name
        if self._thoughts or not self._turns or self._turns[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""})
        self._turns[-1].setdefault("tool_calls", []).append(call)

    def _result(self, item: InputItem, place: str) -> dict[str, Any]:
        name = self._names.get(item.call_id or "")
        if name is None:
            raise InvalidRequest(
                f"{place}.call_id is {str(item.call_id)[:80]!r}; it must be that of a call in an "
                "earlier item or response",
                param=f"{place}.call_id",
            )
        output = item.output
        if isinstance(output, list):
            output = to_text(output, f"{place}.output")
        return {"role": "tool", "tool_call_id": item.call_id, "name": name, "content": output or ""}


def _thoughts(item: InputItem, place: str) -> str:
    """The text of reasoning. There is none where another server sealed it, or did not tell it."""
    if item.content is None or isinstance(item.content, str):
        return item.content or ""
    for number, part in enumerate(item.content):
        if not isinstance(part.get("text"), str | None):
            raise InvalidRequest(
                f"{place}.content[{number}].text is of type {type(part.get('text')).__name__}; it "
                "must be a text, as the reasoning was told",
                param=f"{place}.content[{number}].text",
            )
    return "".join(part.get("text") or "" for part in item.content)


def _message(item: InputItem, place: str) -> dict[str, Any]:
    if item.role is None:
        raise InvalidRequest(f"{place}.role is missing", param=f"{place}.role")
    content = item.content
    if isinstance(content, list):  # what an earlier response said is called by another name
        content = [
            {**part, "type": "text"} if part.get("type") == "output_text" else part
            for part in content
        ]
    return to_message(Message(role=item.role, content=content), place)
