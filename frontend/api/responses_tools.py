"""The tools of /v1/responses as chats have them. Tools of free form (`custom`) are functions of one
text; those that OpenAI itself runs are not served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from frontend.api.openai_schema import FunctionBody, ToolBody
from frontend.api.openai_tools import with_tools
from frontend.api.responses_schema import ResponsesBody, ResponsesTool
from frontend.api.tool_choice import ChoiceForm
from frontend.parsers.free_input import INPUT
from frontend.request import Chat, InputFormat
from tidemill.runtime.errors import InvalidRequest, Unsupported

_SYNTAXES = ("lark", "regex")
_CHOICE = ChoiceForm(
    kinds=("function", "custom"),
    is_nested=False,
    shown='{"type": "function", "name": ...} or the same with custom',
)
_NOT_SERVED: Mapping[str, object] = MappingProxyType(
    {"async": False, "defer_loading": False, "allowed_callers": ["direct"]}
)
"""With the value that asks for nothing."""


def with_tools_of(body: ResponsesBody, chat: Chat) -> Chat:
    """The chat with the tools that the model is told of, and what it must call of them. Raises
    ServiceError naming a tool, or the choice."""
    formats, tools = dict[str, InputFormat](), list[ToolBody]()
    for number, tool in enumerate(body.tools or ()):
        tools.append(ToolBody(type="function", function=_function(tool, f"tools[{number}]")))
        written = _format(tool, f"tools[{number}].format")
        if written is not None and tool.name is not None:
            formats[tool.name] = written
    choice = _CHOICE.read(body.tool_choice)
    chat = with_tools(chat, tools, choice, parallel=body.parallel_tool_calls)
    return replace(chat, input_formats=formats)


def _function(tool: ResponsesTool, place: str) -> FunctionBody:
    if tool.type not in ("function", "custom"):
        raise Unsupported(f"{place}: tools of type {tool.type!r} are not served", param=place)
    if tool.name is None:
        raise InvalidRequest(f"{place}.name is missing", param=f"{place}.name")
    _check_fields(tool, place)
    parameters, strict = tool.parameters, tool.strict
    if tool.type == "custom":
        parameters, strict = _one_text(_format(tool, f"{place}.format"))
    return FunctionBody(
        name=tool.name, description=tool.description, parameters=parameters, strict=strict
    )


def _check_fields(tool: ResponsesTool, place: str) -> None:
    """Raises InvalidRequest for what only tools of another type have, and Unsupported for what asks
    OpenAI to run or to search tools itself."""
    for name in ("parameters", "strict") if tool.type == "custom" else ("format",):
        field = f"{place}.{name}"
        if getattr(tool, name) is not None:
            raise InvalidRequest(f"{field}: {tool.type} tools have none; leave it out", param=field)
    for name, served in _NOT_SERVED.items():
        field = f"{place}.{name}"
        if (tool.model_extra or {}).get(name) not in (None, served):
            raise Unsupported(f"{field} is not served; leave it out", param=field)


def _one_text(written: InputFormat | None) -> tuple[dict[str, Any], bool | None]:
    """The schema of a free-form tool, which tells the model of the grammar, and whether calls are
    held to it."""
    text: dict[str, Any] = {"type": "string"}
    if written is not None and written.syntax == "regex":
        text["pattern"] = f"^(?:{written.definition})$"
    elif written is not None:
        text["description"] = f"Text by this Lark grammar:\n{written.definition}"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return {**schema, "additionalProperties": False}, written is not None or None


def _format(tool: ResponsesTool, place: str) -> InputFormat | None:
    """The grammar of a free-form tool's input; None: any text."""
    given = tool.format
    if tool.type != "custom" or given is None or given.get("type") == "text":
        return None
    syntax, definition = given.get("syntax"), given.get("definition")
    if given.get("type") != "grammar" or syntax not in _SYNTAXES or not isinstance(definition, str):
        raise InvalidRequest(
            f'{place} must be {{"type": "text"}}, or of type grammar with a definition and the '
            f"syntax {' or '.join(_SYNTAXES)}",
            param=place,
        )
    return InputFormat(syntax, definition)
