"""Calls of tools that the model is held to: which grammar an answer follows for them.

A forced call is bare JSON, whatever the model's own format; strict tools are called in the model's
format, in the middle of text. It does not know how calls are read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from frontend.parsers.registry import OutputFormat
from frontend.parsers.tools.hermes import HermesParser
from frontend.request import Chat, TextRequest
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint

_SPACE = {"whitespace_pattern": r" |\r?\n[ \t]{0,24}"}
"""llguidance's option for what may stand between the tokens of JSON: no answer of nothing else."""

_OF_TEXT = frozenset(("response_format", "text.format", "output_config.format", "output_format"))
"""Fields that say how an answer's text is written: a forced call has none, so they go together."""


def with_calls(request: TextRequest, form: OutputFormat) -> TextRequest:
    """The request with the grammar of the calls that its chat asks for.

    Raises InvalidRequest where something else says already what the answer must be, and Unsupported
    for strict tools in a format whose calls no grammar describes.
    """
    found = [
        constraint
        for prompt in request.prompts
        if isinstance(prompt, Chat) and (constraint := call_constraint(prompt, form)) is not None
    ]
    if not found:
        return request
    other = request.options.constraint
    if other is not None and not (found[0].param == "tool_choice" and other.param in _OF_TEXT):
        raise InvalidRequest(
            f"{found[0].param} makes the answer a call, and {other.param} something else; leave "
            "out one of them",
            param=found[0].param,
        )
    return replace(request, options=replace(request.options, constraint=found[0]))


def call_constraint(chat: Chat, form: OutputFormat) -> Constraint | None:
    """What an answer to `chat` must be on account of its tools; None: anything."""
    functions = [tool["function"] for tool in chat.tools]
    if chat.must_call:
        called = [one for one in functions if chat.called in ("", one["name"])]
        text = _arguments(called[0]) if chat.called else _calls(called, chat.parallel_tool_calls)
        return Constraint("ebnf", text, "tool_choice")
    strict = next((i for i, one in enumerate(functions) if one.get("strict")), None)
    if strict is None:
        return None
    param = f"tools[{strict}]"
    if form.tools is None or not issubclass(form.tools, HermesParser):
        raise Unsupported(
            f"{param}: strict: true is served with tool_choice auto only where calls are written "
            "as <tool_call> JSON (hermes); leave strict out, or force the call: tool_choice "
            "required, or the tool's name",
            param=param,
        )
    structures = [_hermes(one) for one in functions]
    tag = {"structures": structures, "triggers": ["<tool_call>"]}
    return Constraint("structural_tag", json.dumps(tag), param)


def _arguments(function: Mapping[str, Any]) -> str:
    """Lark: the arguments of one call."""
    return f"%llguidance {{}}\nstart: %json {json.dumps(_schema(function))}\n"


def _calls(functions: Sequence[Mapping[str, Any]], is_parallel: bool) -> str:
    """Lark: a list of calls; every schema is a root of its own, so that its references hold."""
    more = '(", " call)*' if is_parallel else ""
    rules = [f'%llguidance {{}}\nstart: "[" call {more} "]"']
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "parameters": ')
        rules.append(f'call_{i}: {head} %json {json.dumps(_schema(function))} "}}"')
    return "\n".join(rules) + "\n"


def _hermes(function: Mapping[str, Any]) -> dict[str, Any]:
    name = json.dumps(function["name"])
    schema = _schema(function) if function.get("strict") else {"type": "object"}
    begin = f'<tool_call>\n{{"name": {name}, "arguments": '
    return {"begin": begin, "schema": schema, "end": "}\n</tool_call>"}


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where a schema leaves that open."""
    return {"x-guidance": _SPACE, "type": "object", **(function.get("parameters") or {})}
