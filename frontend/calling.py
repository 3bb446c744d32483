"""Calls of tools that the model is held to: which grammar an answer follows for them.

A forced call is bare JSON, whatever the model's own format; other calls are in that format, in the
middle of text or in place of an answer in JSON. It does not know how calls are read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from frontend import input_grammar
from frontend.beam_rules import no_part
from frontend.calls_or_answer import calls_or_answer, names_of
from frontend.parsers.registry import OutputFormat
from frontend.request import Chat, TextRequest
from frontend.strict_calls import TRIGGER, schema_of, strict_param, structures_of
from tidemill.runtime.errors import InvalidRequest
from tidemill.structured import Constraint

_OF_TEXT = frozenset(("response_format", "text.format", "output_config.format", "output_format"))
"""Fields that say how an answer's text is written: a forced call has none, so they go together."""
_JSON_KINDS = ("json_schema", "json_object")


def with_calls(request: TextRequest, form: OutputFormat) -> TextRequest:
    """The request with the grammar of the calls that its chat asks for.

    Raises InvalidRequest where something else says already what the answer must be, and Unsupported
    for strict tools, or a format of the answer beside tools, where no grammar describes the calls.
    """
    chats = [prompt for prompt in request.prompts if isinstance(prompt, Chat) and prompt.tools]
    if not chats:
        return request
    (chat, *_), asked = chats, request.options.constraint
    found = _either(chat, form, asked)
    if found is None:
        found = call_constraint(chat, form)
        if found is None:
            return request
        if asked is not None and not (chat.must_call and asked.param in _OF_TEXT):
            raise InvalidRequest(
                f"{found.param} makes the answer a call, and {asked.param} something else; leave "
                "out one of them",
                param=found.param,
            )
    if request.options.beam is not None:
        raise no_part(found.param)
    return replace(request, options=replace(request.options, constraint=found))


def _either(chat: Chat, form: OutputFormat, asked: Constraint | None) -> Constraint | None:
    """Where the model may call, and answers in a JSON format if it does not."""
    if asked is None or asked.param not in _OF_TEXT or asked.kind not in _JSON_KINDS:
        return None
    if chat.must_call:
        return None
    return calls_or_answer(asked, _functions(chat), form)


def _functions(chat: Chat) -> list[dict[str, Any]]:
    """The tools, those of free form with the grammars of their inputs."""
    functions = [tool["function"] for tool in chat.tools]
    return [{**one, "input_format": chat.input_formats.get(one["name"])} for one in functions]


def call_constraint(chat: Chat, form: OutputFormat) -> Constraint | None:
    """What an answer to `chat` must be on account of its tools; None: anything."""
    functions = _functions(chat)
    if chat.must_call:
        called = [one for one in functions if chat.called in ("", one["name"])]
        text = _arguments(called[0]) if chat.called else _calls(called, chat.parallel_tool_calls)
        return Constraint("ebnf", text, "tool_choice", tools=names_of(called))
    param = strict_param(functions)
    if not param:
        return None
    tag = {"structures": structures_of(form.tools, functions), "triggers": [TRIGGER]}
    return Constraint("structural_tag", json.dumps(tag), param, tools=names_of(functions))


def _arguments(function: Mapping[str, Any]) -> str:
    """Lark: the arguments of one call; of text by a grammar, the text as it stands."""
    if function["input_format"] is not None:
        return input_grammar.whole(function["input_format"])
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
