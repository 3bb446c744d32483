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
from frontend.request import Chat, TextRequest
from frontend.strict_calls import TRIGGER, schema_of, structure_of
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint

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
    try:
        structures = [structure_of(form.tools, one) for one in functions]
    except Unsupported as refused:
        raise Unsupported(f"{param}: {refused.message}", param=param) from refused
    tag = {"structures": structures, "triggers": [TRIGGER]}
    return Constraint("structural_tag", json.dumps(tag), param)


def _arguments(function: Mapping[str, Any]) -> str:
    """Lark: the arguments of one call."""
    return f"%llguidance {{}}\nstart: %json {json.dumps(schema_of(function))}\n"


def _calls(functions: Sequence[Mapping[str, Any]], is_parallel: bool) -> str:
    """Lark: a list of calls; every schema is a root of its own, so that its references hold."""
    more = '(", " call)*' if is_parallel else ""
    rules = [f'%llguidance {{}}\nstart: "[" call {more} "]"']
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "parameters": ')
        rules.append(f'call_{i}: {head} %json {json.dumps(schema_of(function))} "}}"')
    return "\n".join(rules) + "\n"
