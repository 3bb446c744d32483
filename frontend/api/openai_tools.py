"""Tools of a chat: what OpenAI's clients send of them, and what they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.api.openai_schema import ToolBody
from frontend.parsers.base import ToolCall
from frontend.reading import CallDelta
from tidemill.runtime.errors import InvalidRequest, Unsupported

ToolChoice = str | dict[str, Any] | None


def to_tools(tools: Sequence[ToolBody], choice: ToolChoice) -> list[dict[str, Any]]:
    """The tools that the model is told of; none for the choice `none`.

    Raises InvalidRequest for names that are not unique, and Unsupported for what takes constrained
    decoding.
    """
    names = [tool.function.name for tool in tools]
    for i, tool in enumerate(tools):
        if tool.function.name in names[:i]:
            raise InvalidRequest(
                f"two tools are called {tool.function.name!r}; give each a name of its own",
                param=f"tools[{i}]",
            )
        if tool.function.strict:
            raise Unsupported(
                f"tools[{i}]: strict: true is not served, because no grammar holds the model to "
                "the schema; leave strict out, and check the arguments",
                param=f"tools[{i}]",
            )
    _check_choice(choice)
    if choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in tools]


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


def _check_choice(choice: ToolChoice) -> None:
    """Raises for a tool_choice that is none, or that is not served."""
    if choice is None or choice in ("none", "auto"):
        return
    name = _chosen_name(choice)
    if choice != "required" and name is None:
        raise InvalidRequest(
            "tool_choice must be none, auto, required or "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    raise Unsupported(
        f"tool_choice {name or 'required'!r}: a call cannot be forced, because no grammar holds "
        "the model to it; use auto, and ask for the call in a message",
        param="tool_choice",
    )


def _chosen_name(choice: str | dict[str, Any]) -> str | None:
    """The tool that a choice names, if it is of that form."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
