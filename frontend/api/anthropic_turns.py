"""Anthropic's turns as the messages that chat templates expect. It does not know requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.api.anthropic_schema import Turn
from frontend.api.openai_request import to_text
from tidemill.runtime.errors import InvalidRequest, Unsupported

Messages = list[dict[str, Any]]


def to_messages(turns: Sequence[Turn]) -> Messages:
    """Turns of the same role that follow each other are one message; results of tools are messages
    of the role `tool`. Raises InvalidRequest or Unsupported naming the turn."""
    runs: list[Messages] = []
    names: dict[str, str] = {}
    for number, turn in enumerate(turns):
        for message in _Reader(turn, f"messages[{number}].content", names).messages():
            if runs and _are_one(runs[-1][-1], message):
                runs[-1].append(message)
            else:
                runs.append([message])
    messages = [_joined(run) for run in runs]
    if not messages:
        raise InvalidRequest("messages have no content that is read here", param="messages")
    if messages[-1].get("tool_calls"):
        last = f"messages[{len(turns) - 1}]"
        raise InvalidRequest(
            f"{last} calls tools; a turn with their results must follow it", param=last
        )
    return messages


class _Reader:
    """One turn; `names` are those of the tools called up to now, by the id of the call."""

    def __init__(self, turn: Turn, place: str, names: dict[str, str]) -> None:
        self._turn = turn
        self._place = place
        self._names = names
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._results: Messages = []

    def messages(self) -> Messages:
        """Results of tools first: they answer the turn before."""
        role, content = self._turn.role, self._turn.content
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        if not content:
            raise InvalidRequest(f"{self._place} is empty", param=self._place)
        for block in content:
            self._read(block)
        message: dict[str, Any] = {"role": role, "content": "\n".join(self._texts)}
        if self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        is_empty = not (self._texts or self._thoughts or self._calls)
        return self._results if is_empty else [*self._results, message]

    def _read(self, block: dict[str, Any]) -> None:
        kind, role = block.get("type", "text"), self._turn.role
        if kind == "text":
            self._texts.append(self._string(block, "text", kind))
        elif kind == "thinking" and role == "assistant":
            self._thoughts.append(self._string(block, "thinking", kind))
        elif kind == "redacted_thinking" and role == "assistant":
            pass  # sealed by another server: nobody here can read it, and answers go on without it
        elif kind == "tool_use" and role == "assistant":
            name, call_id = self._string(block, "name", kind), self._string(block, "id", kind)
            function = {"name": name, "arguments": self._input(block)}
            self._names[call_id] = name
            self._calls.append({"id": call_id, "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            self._results.append(self._result(block))
        else:
            raise Unsupported(
                f"{self._place}: blocks of type {kind!r} are not served in turns of the role "
                f"{role!r}",
                param=self._place,
            )

    def _result(self, block: dict[str, Any]) -> dict[str, Any]:
        call_id, content = self._string(block, "tool_use_id", "tool_result"), block.get("content")
        if call_id not in self._names:
            raise InvalidRequest(
                f"{self._place}: tool_use_id {call_id[:80]!r} is not the id of a call in an "
                "earlier turn",
                param=self._place,
            )
        if isinstance(content, list):
            content = to_text(content, self._place)
        if not isinstance(content, str | None):
            raise InvalidRequest(
                f"{self._place}: the content of a tool_result must be a string or blocks of text",
                param=self._place,
            )
        name = self._names[call_id]
        return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content or ""}

    def _input(self, block: dict[str, Any]) -> dict[str, Any]:
        given = block.get("input")
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise InvalidRequest(
                f"{self._place}: the input of a tool_use is of type {type(given).__name__}; it "
                "must be an object, as the call was told",
                param=self._place,
            )
        return given

    def _string(self, block: dict[str, Any], field: str, kind: str) -> str:
        value = block.get(field)
        if not isinstance(value, str):
            raise InvalidRequest(
                f"{self._place}: a block of type {kind} needs a string in `{field}`",
                param=self._place,
            )
        return value


def _are_one(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before["role"] == after["role"] and after["role"] in ("user", "assistant")


def _joined(run: Messages) -> dict[str, Any]:
    """Messages as one: texts with a line end between, calls behind each other. All at once: joined
    one by one, 40,000 of them would be copied 40,000 times."""
    if len(run) == 1:
        return run[0]
    joined = {name: value for one in run for name, value in one.items()}
    for field in ("content", "reasoning_content"):
        if field in joined:
            joined[field] = "\n".join(one[field] for one in run if one.get(field))
    calls = [call for one in run for call in one.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined
