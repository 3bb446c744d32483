"""Whole numbers of JSON schemas beyond 2^53, which llguidance holds as float64 and so may change.

A bound becomes the next float64 inside of it: what the grammar then allows, the schema allows too.
One beyond the library's 64 bits becomes their end, however it is written (-1e300): of a range that
lies below them the library never finds the digits, and its stack ends with the process.
A value that must be met cannot be moved, and is refused.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any
from urllib.parse import unquote

_EXACT = 2**53
"""Up to here every whole number is a float64."""
_LEAST, _MOST = -(2**63 - 1024), 2**63 - 1024
"""Float64 within the library's 64 bits, as whose digits it writes a range."""
_LOW = {"minimum": 0, "exclusiveMinimum": 1}
_HIGH = {"maximum": 0, "exclusiveMaximum": 1}
"""By how much the first allowed number lies inside."""
_MET = ("const", "enum", "multipleOf")
_PASSED = ("default", "examples", "example")
"""What says nothing of a text."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Schemas by names, which may be any of these words."""
_JSON = re.compile(r"%json\s*(?=[{\[])")
_MOST_MISSES = 100
"""Places in a Lark grammar that look like a schema and are none, as in a text or a comment. Python
counts lines up to each: 100,000 of them in a megabyte took 40 s."""


def held_schema(schema: Any) -> Any:
    """The same, with bounds that the library holds. Raises ValueError where a value is none."""
    if isinstance(schema, list):
        return [held_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _held(key, value) for key, value in schema.items()}


def held_text(text: str) -> str:
    """The same of a schema's text; one that is no JSON is for the library to refuse."""
    try:
        schema = json.loads(text)
    except ValueError:
        return text
    held = held_schema(schema)
    return text if held == schema else json.dumps(held)


def held_lark(text: str) -> str:
    """The same of the schemas inside of a Lark grammar (`%json {...}`)."""
    pieces, at, num_misses = [], 0, 0
    for found in _JSON.finditer(text):
        if found.end() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            num_misses += 1
            if num_misses > _MOST_MISSES:
                raise ValueError(f"more than {_MOST_MISSES} %json are not JSON") from None
            continue
        held = held_schema(schema)
        if held != schema:
            pieces += [text[at : found.end()], json.dumps(held)]
            at = end
    return "".join([*pieces, text[at:]])


def _held(key: str, value: Any) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: held_schema(one) for name, one in value.items()}
    if key in _PASSED:
        return value
    if key in _MET:
        _check_met(key, value)
        return value
    if key == "$ref" and isinstance(value, str):
        _check_target(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and abs(value) >= _EXACT:
        # That one, also for an exclusive bound: the library adds 1 to a float64.
        if key in _LOW:
            return _above(value + _LOW[key])
        if key in _HIGH:
            return -_above(_HIGH[key] - value)
    return held_schema(value)


def _check_target(reference: str) -> None:
    """Refuses a reference to what is held as a value: its bounds stay as they are."""
    is_name = False
    for part in unquote(reference.partition("#")[2]).split("/"):
        if not is_name and part in (*_MET, *_PASSED):
            raise ValueError(f"$ref {reference!r} names what stands in {part}, which is no schema")
        is_name = not is_name and part in _NAMED


def _above(value: int) -> int:
    """The next float64 from here on that the library holds; above them all nothing fits, as it will
    say itself."""
    if value > _MOST:
        return value
    near = float(max(value, _LEAST))
    return int(near if near >= value else math.nextafter(near, math.inf))


def _check_met(key: str, value: Any) -> None:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_met(key, one)
    elif isinstance(value, int) and abs(value) > _EXACT and not _is_held(value):
        raise ValueError(
            f"{key} has {value}, which would be rounded; whole numbers up to {_EXACT:,} (2^53) are "
            "exact, larger ones may be strings"
        )


def _is_held(value: int) -> bool:
    return _LEAST <= value <= _MOST and int(float(value)) == value
