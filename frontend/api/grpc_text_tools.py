"""Tools and tool calls between TextService's messages and the frontend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import ValidationError

from frontend.api import openai_tools
from frontend.api.openai_schema import ToolBody
from frontend.api.tool_choice import MODES, ToolChoice
from frontend.parsers.base import ToolCall
from frontend.reading import CallDelta
from frontend.request import Chat
from tidemill.nesting import check_nesting
from tidemill.runtime.errors import InvalidRequest
from tidemill.v1 import text_pb2


def with_tools(prompt: Chat, chat: text_pb2.ChatOptions) -> Chat:
    """The prompt with its tools, as openai_tools.with_tools, which words the refusals."""
    choice = ToolChoice(chat.tool_choice.mode or "auto")
    if chat.tool_choice.function_name:
        choice = ToolChoice("required", chat.tool_choice.function_name)
    if choice.mode not in MODES:
        raise InvalidRequest(
            f"tool_choice.mode must be {', '.join(MODES)}, or give function_name in its place",
            param="tool_choice",
        )
    tools = [_to_tool(tool, f"tools[{i}]") for i, tool in enumerate(chat.tools)]
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None
    return openai_tools.with_tools(prompt, tools, choice, parallel=parallel)


def call_messages(calls: Sequence[ToolCall | CallDelta]) -> list[text_pb2.ToolCall]:
    """Whole calls, or news of them."""
    return [
        text_pb2.ToolCall(
            index=call.call if isinstance(call, CallDelta) else i,
            id=call.id,
            name=call.name,
            arguments_json=call.arguments,
        )
        for i, call in enumerate(calls)
    ]


def _to_tool(tool: text_pb2.Tool, place: str) -> ToolBody:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    try:
        if tool.parameters_json_schema:
            check_nesting(tool.parameters_json_schema, f"{place}.parameters_json_schema")
            function["parameters"] = orjson.loads(tool.parameters_json_schema)
        return ToolBody.model_validate({"type": "function", "function": function})
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(
            f"{place}.parameters_json_schema is not valid JSON: {failure}", param=place
        ) from failure
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_context=False)[0]
        raise InvalidRequest(
            f"{place}.{first['loc'][-1]}: {first['msg']}", param=place
        ) from failure
