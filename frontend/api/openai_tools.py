"""Tools of a chat: what OpenAI's clients send of them, and what they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from pydantic_core import from_json

from frontend.api.openai_schema import ToolBody
from frontend.api.tool_choice import ChoiceForm, ToolChoice
from frontend.parsers.base import ToolCall
from frontend.reading import CallDelta
from frontend.request import Chat
from tidemill.nesting import check_nesting
from tidemill.runtime.errors import InvalidRequest

CHOICE = ChoiceForm(
    kinds=("function",), is_nested=True, shown='{"type": "function", "function": {"name": ...}}'
)
"""`tool_choice` of chats."""
INVALID_JSON = "INVALID_JSON"
"""What Anthropic's documentation calls arguments that are no JSON object, where one must stand."""


def with_tools(
    chat: Chat, tools: Sequence[ToolBody], choice: ToolChoice, *, parallel: bool | None
) -> Chat:
    """The chat with the tools that the model is told of (none for the choice `none`), and with what
    it must call of them.

    Raises InvalidRequest for names that are not unique, parameters that are no object, and a
    choice that names no tool.
    """
    names = _names_of(tools)
    allowed, must_call = choice.allowed or (), choice.mode == "required"
    unknown = [name for name in (*allowed, choice.name) if name and name not in names]
    if unknown or (must_call and not names):
        raise InvalidRequest(
            f"tool_choice is {', '.join(map(repr, unknown)) or repr(choice.mode)}, and tools has "
            f"{', '.join(names) or 'none'}; name one of its tools",
            param="tool_choice",
        )
    kept = () if choice.mode == "none" else allowed or names
    told = [tool for tool in tools if tool.function.name in kept]
    return replace(
        chat,
        tools=tuple(tool.model_dump(exclude_none=True) for tool in told),
        must_call=must_call,
        called=choice.name,
        parallel_tool_calls=parallel is not False,
    )


def _names_of(tools: Sequence[ToolBody]) -> dict[str, None]:
    """Raises InvalidRequest for names that are not unique, and parameters that are no object."""
    names = dict[str, None]()  # looked up and not searched: a body may hold tens of thousands
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            raise InvalidRequest(
                f"two tools are called {name!r}; give each a name of its own",
                param=f"tools[{i}]",
            )
        names[name] = None
        kind = (tool.function.parameters or {}).get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise InvalidRequest(
                f"the parameters of {name!r} are of type {kind!r}, but arguments are an object; "
                'give {"type": "object", "properties": {...}}',
                param=f"tools[{i}].function.parameters",
            )
    return names


def with_arguments(call: Any, param: str) -> dict[str, Any]:
    """Templates expect the arguments of earlier tool calls as objects, not as JSON text. Raises
    InvalidRequest for what is no call, for arguments that are neither, and for deep ones."""
    try:
        function = dict(call["function"])
        told: dict[str, Any] = {**call, "function": function}
    except (KeyError, TypeError, ValueError) as failure:
        raise InvalidRequest(f"{param}: not a tool call: {failure}", param=param) from failure
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    if isinstance(arguments, str):
        check_nesting(arguments, param)
        arguments = as_object(arguments)
    elif not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{param}: arguments are of type {type(arguments).__name__}; they must be the text of "
            "a JSON object, as the call was told",
            param=param,
        )
    function["arguments"] = arguments
    return told


def as_object(arguments: str) -> dict[str, Any]:
    """Arguments of an earlier call as templates read them, which may go through their names. What
    is no JSON object is told as it stands: a model may have written it, and the client that was
    given it sends it back."""
    try:
        found = whole(arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: arguments}


def whole(arguments: str) -> Any:
    """The value of a JSON text, of one that `max_tokens` has cut off as much as is there. Raises
    ValueError for what is no JSON."""
    try:
        return orjson.loads(arguments)
    except ValueError:
        if not _is_cut_off(arguments):
            raise
        return from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")


def _is_cut_off(arguments: str) -> bool:
    """Whether they are the beginning of an object."""
    try:
        from_json(arguments, allow_inf_nan=False)
    except ValueError as failure:
        return arguments.lstrip().startswith("{") and "EOF while parsing" in str(failure)
    return False


def tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Whole calls, as a message has them."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def call_deltas(news: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """News of calls, as a chunk has them: id, type and name come once."""
    entries = []
    for one in news:
        entry: dict[str, Any] = {"index": one.call, "function": {"arguments": one.arguments}}
        if one.name:
            entry |= {"id": one.id, "type": "function"}
            entry["function"] = {"name": one.name, "arguments": one.arguments}
        entries.append(entry)
    return entries
