"""An answer in a JSON format beside tools that may be called: a grammar for either.

The answer is calls, as the model writes them, or JSON by the schema, and nothing around them. It
does not know how either is read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from frontend.parsers.registry import OutputFormat
from frontend.parsers.tools.harmony import turn_of
from frontend.strict_calls import SPACE, is_described, schemas_of, structures_of
from tidemill.runtime.errors import Unsupported
from tidemill.structured import Constraint

_SPACES = r"/[ \t\r\n]{1,8}/"


def calls_or_answer(
    asked: Constraint, functions: Sequence[Mapping[str, Any]], form: OutputFormat
) -> Constraint:
    """`asked`, of the kind json_schema or json_object, with calls of `functions` in its place.

    Raises Unsupported for formats whose calls no grammar describes, and for strict functions that
    cannot be held to their schemas.
    """
    asked = asked._replace(tools=names_of(functions))
    if form.reads_channels:
        return asked._replace(reasoning=turn_of(schemas_of(functions)), may_call=True)
    if not is_described(form.tools):
        raise Unsupported(
            f"{asked.param} beside tools is served where calls are written as <tool_call> (hermes, "
            "qwen3_coder, glm45) or in channels (openai); leave tools out, or say with tool_choice "
            "whether the model is to answer (none) or to call (required)",
            param=asked.param,
        )
    calls = [_in_lark(one) for one in structures_of(form.tools, functions)]
    schema = {"type": "object"} if asked.kind == "json_object" else json.loads(asked.text)
    rules = [
        "%llguidance {}",
        "start: answer | SPACE? call (SPACE? call)*",
        f"answer: %json {json.dumps({'x-guidance': SPACE, **schema})}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(calls))),
        *(f"call_{i}: {text}" for i, text in enumerate(calls)),
        f"SPACE: {_SPACES}",
    ]
    return asked._replace(kind="ebnf", text="\n".join([*rules, ""]), may_call=True)


def names_of(functions: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Of functions, in the order of the rules for their calls."""
    return tuple(one["name"] for one in functions)


def _in_lark(structure: Mapping[str, Any]) -> str:
    lark = structure.get("lark")
    inner = f"%lark {{\n{lark}}}" if lark else f"%json {json.dumps(structure['schema'])}"
    end = json.dumps(structure["end"]) if structure["end"] else ""
    return f"{json.dumps(structure['begin'])} {inner} {end}".rstrip()
