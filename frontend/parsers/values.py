"""Values that models write in other notations, as JSON."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

_TYPES: tuple[tuple[type, str], ...] = (
    (str, "string"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (dict, "object"),
    (list, "array"),
    (tuple, "array"),
    (type(None), "null"),
)
"""In this order: a bool is an int."""


def quoted(text: str) -> str:
    """Text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def without_halves(text: str) -> str:
    """Halves of surrogate pairs joined, or, where one stands alone and is no text, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def types_of(schema: object, *, depth: int = 8) -> frozenset[str]:
    """The JSON types that a schema allows; none where it does not say. `any` stands for a
    reference, which may be to anything, and for unions that nest deeper than `depth`."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if not depth or "$ref" in schema:
        return frozenset({"any"})
    given = schema.get("type")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    found = {given} if isinstance(given, str) else set(map(str, _listed(given)))
    for union in ("anyOf", "oneOf", "allOf"):
        found = found.union(*(types_of(one, depth=depth - 1) for one in _listed(schema.get(union))))
    return frozenset(found or map(_type_of, _listed(choices)))


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def to_json(value: str, types: frozenset[str]) -> str:
    """A value's text as JSON of one of `types`, else as a string. Literals of Python, which models
    write too, are understood."""
    text = value.strip()
    try:
        parsed = json.loads(text, parse_constant=_refuse)
        written = text
    except ValueError:
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
                parsed = ast.literal_eval(text)
            written = without_halves(json.dumps(parsed, ensure_ascii=False, allow_nan=False))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return quoted(value)
    except RecursionError:
        return quoted(value)
    kind = _type_of(parsed)
    if kind == "null" or "string" not in types:
        allowed = types | ({"integer"} if "number" in types else set())
        if kind in allowed or "any" in types:
            return written
    return quoted(value)


def _type_of(value: Any) -> str:
    """The JSON type of a parsed value; '' for what JSON does not know."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
