"""Messages, tools and tool calls: what callers write, in OpenAI's form, as TextService's fields.

What TextService cannot carry is refused by name. It does not know gRPC, and leaves to the server
what a chat template can be told and which choices of a tool are served.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.given import several
from tidemill.runtime.errors import InvalidRequest, Unsupported

Fields = dict[str, Any]
Message = Mapping[str, Any]
"""{"role": ..., "content": text}. An assistant's may have `tool_calls` (ToolCall, or OpenAI's form)
and `reasoning`; a tool's has the `tool_call_id` that it answers; all may have a `name`."""
Conversation = str | Sequence[Message]
"""A user's message, or messages, oldest first."""
Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}"""

_TEXTS = ("name", "tool_call_id")
_REASONING = ("reasoning", "reasoning_content")
_MESSAGE_KEYS = ("role", "content", "tool_calls", *_TEXTS, *_REASONING)
_TOOL_KEYS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool. In a stream, its newest part: `id` and `name` come once, with the first
    part, and `arguments` in pieces; parts of one call have the same `index`."""

    index: int
    id: str
    name: str
    arguments: str
    """JSON as the model wrote it; of an answer that was cut off it may be incomplete."""


def message_fields(messages: Conversation) -> list[Fields]:
    """ChatMessages. Raises InvalidRequest, and Unsupported for keys that they do not have."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    listed = several("messages", messages, "a text, or a list of messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(listed)]


def tool_fields(tools: Sequence[Tool]) -> list[Fields]:
    """Tools, with their schemas as JSON. Raises as `message_fields`."""
    listed = several("tools", tools, "a list of tools in OpenAI's form")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed)]


def choice_fields(choice: str | Mapping[str, Any]) -> Fields:
    """A ToolChoice of a mode, or of {"type": "function", "function": {"name": ...}}."""
    if isinstance(choice, str):
        return {"mode": choice}
    function = _function(choice, ("name",), "tool_choice")
    return {"function_name": _text(function.get("name"), "tool_choice.function.name")}


def to_tool_call(call: Any) -> ToolCall:
    """A ToolCall message as a value."""
    return ToolCall(index=call.index, id=call.id, name=call.name, arguments=call.arguments_json)


def _message(message: Message, place: str) -> Fields:
    given = _known(message, _MESSAGE_KEYS, place)
    fields: Fields = {"role": _text(given.get("role"), f"{place}.role")}
    calls = given.get("tool_calls", ())
    # An answer of calls alone has no content; everybody else must say something, if only "".
    if not calls or given.get("content"):
        fields["parts"] = [{"text": _text(given.get("content"), f"{place}.content")}]
    for key in _TEXTS:
        if key in given:
            fields[key] = _text(given[key], f"{place}.{key}")
    for key in _REASONING:
        if key in given:
            fields["reasoning"] = _text(given[key], f"{place}.{key}")
    if calls:
        calls = several(f"{place}.tool_calls", calls, "a list of tool calls")
        fields["tool_calls"] = [
            _call(call, i, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return fields


def _call(call: ToolCall | Mapping[str, Any], index: int, place: str) -> Fields:
    if isinstance(call, ToolCall):
        id_, name, arguments = call.id, call.name, call.arguments
    else:
        function = _function(call, ("name", "arguments"), place, beside=("id", "index"))
        name = _text(function.get("name"), f"{place}.function.name")
        arguments = _text(function.get("arguments"), f"{place}.function.arguments")
        id_ = _text(call.get("id"), f"{place}.id")
    return {"index": index, "id": id_, "name": name, "arguments_json": arguments}


def _tool(tool: Tool, place: str) -> Fields:
    given = _function(tool, _TOOL_KEYS, place)
    fields: Fields = {"name": _text(given.get("name"), f"{place}.function.name")}
    if "description" in given:
        fields["description"] = _text(given["description"], f"{place}.function.description")
    if "parameters" in given:
        schema = f"{place}.function.parameters"
        try:
            fields["parameters_json_schema"] = json.dumps(given["parameters"], allow_nan=False)
        except (TypeError, ValueError, RecursionError) as failure:
            raise InvalidRequest(f"{schema} is not JSON: {failure}", param=schema) from failure
    if "strict" in given:
        fields["strict"] = strict = given["strict"]
        if not isinstance(strict, bool):
            where = f"{place}.function.strict"
            raise InvalidRequest(f"{where} is {strict!r}; it must be a bool", param=where)
    return fields


def _function(
    given: Any, keys: tuple[str, ...], place: str, *, beside: tuple[str, ...] = ()
) -> Fields:
    """What stands in `function`, the only type of tool that there is."""
    outer = _known(given, ("type", "function", *beside), place)
    if outer.get("type", "function") != "function":
        raise Unsupported(
            f"{place}.type is {outer['type']!r}; only 'function' is served", param=f"{place}.type"
        )
    return _known(outer.get("function"), keys, f"{place}.function")


def _known(given: Any, keys: tuple[str, ...], place: str) -> Fields:
    """What is not None of a mapping that has no other keys."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"{place} is {reprlib.repr(given)}; it must be a mapping with {', '.join(keys)}",
            param=place,
        )
    present = {key: value for key, value in given.items() if value is not None}
    for key in present:
        if key not in keys:
            raise Unsupported(
                f"{place}.{key} is not sent over gRPC, leave it out; {place} may have "
                f"{', '.join(keys)}",
                param=f"{place}.{key}",
            )
    return present


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{place} is {reprlib.repr(value)}; it must be a text", param=place)
    return value
