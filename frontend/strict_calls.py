"""Strict tools as structural tags: how a call of a tool is written in each format, by its schema.

In the XML formats arguments are text between tags, so their grammar is Lark: parameters in the
schema's order, of strings the text as it stands, of everything else JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from frontend.input_grammar import up_to
from frontend.parsers.grammar import GrammarParser
from frontend.parsers.tools.glm import GlmParser
from frontend.parsers.tools.hermes import HermesParser
from frontend.parsers.tools.qwen3_coder import Qwen3CoderParser
from frontend.parsers.values import types_of
from tidemill.runtime.errors import Unsupported

SPACE: dict[str, Any] = {"whitespace_pattern": r" |\r?\n[ \t]{0,24}"}
"""llguidance's option for what may stand between the tokens of JSON: no answer of nothing else."""
TRIGGER = "<tool_call>"
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
"""What text that ends at a tag cannot be held to."""
_UNIONS = ("anyOf", "oneOf")
_MOST_SHARED_CHARS = 16 << 20
"""What references lead to stands in the grammar once for every parameter: of 4 MB of JSON that is
easily a terabyte."""


class _Tags(NamedTuple):
    """What stands around a call, a parameter's key and its value. Where `is_loose`, line ends may
    be missing."""

    begin: str
    key: str
    value_end: str
    end: str
    is_loose: bool = False


_QWEN3_CODER = _Tags(
    "<tool_call>\n<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n",
    "</function>\n</tool_call>",
)  # fmt: skip
_GLM = _Tags(
    "<tool_call>{name}", "\n<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>",
    "\n</tool_call>", is_loose=True,
)  # fmt: skip


def is_described(parser: type[GrammarParser] | None) -> bool:
    """Whether `structures_of` knows how calls are written that this parser reads."""
    return parser is not None and issubclass(parser, tuple(_MAKERS))


def strict_param(functions: Sequence[Mapping[str, Any]]) -> str:
    """The field of the first strict one; empty: there is none."""
    return next((f"tools[{i}]" for i, one in enumerate(functions) if one.get("strict")), "")


def structures_of(
    parser: type[GrammarParser] | None, functions: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The structures for calls of these functions; arguments of strict ones follow their schema.

    Raises Unsupported, naming the first strict one, for formats and schemas that no call can be
    held to.
    """
    with _named(functions):
        return [_structure(parser, one) for one in functions]


def schemas_of(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the arguments of a call are held to, by name. Raises Unsupported as `structures_of`."""
    with _named(functions):
        return {one["name"]: arguments_of(one) for one in functions}


@contextmanager
def _named(functions: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    try:
        yield
    except Unsupported as refused:
        param = strict_param(functions)
        raise Unsupported(f"{param}: {refused.message}", param=param) from refused


def _structure(parser: type[GrammarParser] | None, function: Mapping[str, Any]) -> dict[str, Any]:
    for kind, make in _MAKERS.items():
        if parser is not None and issubclass(parser, kind):
            return make(function)
    raise Unsupported(
        "strict: true is served with tool_choice auto only where calls are written as <tool_call> "
        "(hermes, qwen3_coder, glm45); leave strict out, or force the call: tool_choice required, "
        "or the tool's name"
    )


def schema_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where a schema leaves that open, or allows null beside it. What
    the library cannot hold them to (`not`, `uniqueItems`, a format nobody knows) is an error where
    the function is strict, and as good as absent where it is not. Raises Unsupported for an input
    that JSON cannot hold to its grammar."""
    written = function.get("input_format")
    if written is not None and written.syntax == "lark":
        raise Unsupported(
            f"{function['name']!r} takes text by a Lark grammar, which calls written as JSON are "
            "not held to; name the tool in tool_choice, or give the grammar as a regex",
            param="tools",
        )
    options = SPACE if function.get("strict") else {**SPACE, "lenient": True}
    parameters = function.get("parameters") or {}
    return {"x-guidance": options, "type": "object", **parameters} | {"type": "object"}


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that the arguments of a call are held to: any object, unless it is strict."""
    is_strict = function.get("strict")
    return schema_of(function if is_strict else {})


def _hermes(function: Mapping[str, Any]) -> dict[str, Any]:
    name = json.dumps(function["name"])
    begin = f'{TRIGGER}\n{{"name": {name}, "arguments": '
    return {"begin": begin, "schema": arguments_of(function), "end": "}\n</tool_call>"}


def _tagged(tags: _Tags) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Makes the structures of calls in this form."""

    def make(function: Mapping[str, Any]) -> dict[str, Any]:
        rules = _arguments(function, tags) if function.get("strict") else _ANYTHING
        lark = f'%llguidance {{}}\n{rules}\nTEXT: /(.|\\n)*/\nnl: "\\n"?\n'
        return {"begin": tags.begin.format(name=function["name"]), "lark": lark, "end": ""}

    return make


_ANYTHING = 'start: rest\nrest[lazy]: TEXT "</tool_call>"'


def _arguments(function: Mapping[str, Any], tags: _Tags) -> str:
    """Rules for all parameters of a strict function, up to the end of its call."""
    schema, written = function.get("parameters") or {}, function.get("input_format")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        raise Unsupported(f"strict: the parameters of {function['name']!r} must be a plain object")
    required, shared = schema.get("required", []), _shared(schema)
    if not isinstance(required, list):
        raise Unsupported(f"strict: `required` of {function['name']!r} must be a list")
    if len(properties) * len(json.dumps(shared)) > _MOST_SHARED_CHARS:
        raise Unsupported(
            f"strict: the $defs of {function['name']!r} are too large to be repeated for each of "
            f"{len(properties)} parameters; give fewer, or write them where they are used"
        )
    names = frozenset(one for one in required if isinstance(one, str))
    rules, parts = [], []
    for number, (key, given) in enumerate(properties.items()):
        if written is None:
            value = _value(function["name"], key, given, shared, tags)
        else:
            value = up_to(written, tags.value_end)
        lead = _literal(tags.key.format(key=key), is_loose=tags.is_loose)
        lazy = "[lazy]" if value.startswith("TEXT") else ""
        rules.append(f"p{number}: {lead} v{number}\nv{number}{lazy}: {value}")
        parts.append(f"p{number}" if key in names else f"p{number}?")
    start = " ".join([*parts, _literal(tags.end, is_loose=tags.is_loose)])
    return "\n".join([f"start: {start}", *rules])


def _value(tool: str, key: str, given: Any, shared: Mapping[str, Any], tags: _Tags) -> str:
    """A value and what ends it, in Lark."""
    end = _literal(tags.value_end, is_loose=False)
    schema = given if isinstance(given, Mapping) else {}
    choices, types = _choices(schema), types_of(schema)
    if not isinstance(choices, list | None):
        raise Unsupported(f"strict: `enum` of {key!r} of {tool!r} must be a list")
    if choices is not None:
        is_text = [isinstance(one, str) for one in choices]
        if any(is_text):
            if not all(one is None or is_one for one, is_one in zip(choices, is_text, strict=True)):
                raise Unsupported(
                    f"strict: {key!r} of {tool!r} is chosen of texts and other values"
                )
            words = ["null" if one is None else one for one in choices]
            return f"({' | '.join(_literal(one, is_loose=False) for one in words)}) {end}"
    elif not types or "string" in types:
        held = _held(schema)
        if held:
            raise Unsupported(f"strict: {held[0]} of {key!r} of {tool!r} cannot be held to here")
        return f"TEXT {end}"
    return f"%json {json.dumps({'x-guidance': SPACE, **schema, **shared})} {end}"


def _choices(schema: Mapping[str, Any]) -> Any:
    """What a value is one of; None where it is not chosen. A union of choices, and of null, is one
    choice, as optional ones are written."""
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema or not (unions := [schema[name] for name in _UNIONS if name in schema]):
        return schema.get("enum")
    found: list[Any] = []
    for one in unions[0] if len(unions) == 1 and isinstance(unions[0], list) else [None]:
        if not isinstance(one, Mapping):
            return None
        choices = [None] if one.get("type") == "null" else _choices(one)
        if not isinstance(choices, list):
            return None
        found += choices
    return found


def _held(schema: Mapping[str, Any], *, depth: int = 8) -> list[str]:
    """Words of a schema, and of what it is a union of, that text cannot be held to."""
    listed = schema.get("anyOf")
    if isinstance(listed, list) and any(map(_is_any_text, listed)):
        return []  # whatever else it may be, it may be that
    found = [word for word in _OF_STRINGS if word in schema]
    for name in (*_UNIONS, "allOf"):
        branches = schema.get(name)
        for one in branches if isinstance(branches, list) and depth else ():
            if isinstance(one, Mapping) and (not types_of(one) or "string" in types_of(one)):
                found += [word for word in ("enum", "const") if word in one]
                found += _held(one, depth=depth - 1)
    return found


def _is_any_text(schema: Any) -> bool:
    words = {*_OF_STRINGS, *_UNIONS, "allOf", "enum", "const", "$ref"}
    is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    return is_text and not words & schema.keys()


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references lead to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _literal(text: str, *, is_loose: bool) -> str:
    """A text in Lark; where line ends may be missing, with rules for them."""
    if not is_loose:
        return json.dumps(text)
    return " nl ".join(json.dumps(part) if part else "" for part in text.split("\n")).strip()


_MAKERS: Mapping[type[GrammarParser], Callable[[Mapping[str, Any]], dict[str, Any]]] = (
    MappingProxyType(
        {
            HermesParser: _hermes,
            Qwen3CoderParser: _tagged(_QWEN3_CODER),
            GlmParser: _tagged(_GLM),
        }
    )
)
