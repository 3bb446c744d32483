"""Values in other notations become JSON, whatever they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.parsers.values import quoted, to_json, types_of, without_halves

HARD = [
    "", " ", "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 5000, "-" * 300000 + "1",
    "1+" * 9999 + "1", "{1, 2}", "b'x'", "1+2j", "{(1,): 2}", "{[]: 1}", "...", "'\\d'",
    "'\\ud83d'", '"\\ud83d"', "\x00",
    "None", "True", "(1, 'a')", "{'a': None}", '{"a": 1} x',
]  # fmt: skip
TYPES = ("string", "boolean", "integer", "number", "object", "array", "null", "any")


def check(text: str, types: frozenset[str]) -> None:
    written = to_json(text, types)
    written.encode()
    parsed = json.loads(written, parse_constant=pytest.fail)
    assert isinstance(parsed, str) or types & {"any", *kinds(parsed)} or parsed is None


def kinds(value: Any) -> set[str]:
    names = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, dict: {"object"}}
    return names.get(type(value), {"array"})


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"const": 5}, {"integer"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"const": 1}, {"const": None}]}, {"integer", "null"}),
        ({"enum": [1, "a"]}, {"integer", "string"}),
        ({"const": 1, "type": "number"}, {"number"}),
        ({}, set()),
    ],
)
def test_types_are_those_of_what_is_chosen(schema: dict[str, Any], types: set[str]) -> None:
    assert types_of(schema) == types


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("kind", TYPES)
def test_hard_values_are_json_of_the_type_or_a_string(text: str, kind: str) -> None:
    check(text, frozenset({kind}))


@given(st.text("[]{}(),:'\"\\ud8aNone1.-e \n", max_size=20), st.sets(st.sampled_from(TYPES)))
def test_any_value_is_json_of_the_type_or_a_string(text: str, types: set[str]) -> None:
    check(text, frozenset(types))


@pytest.mark.parametrize(
    ("text", "kind", "written"),
    [
        ("12", "string", '"12"'),
        ("12", "integer", "12"),
        ("12.0", "integer", '"12.0"'),
        ("12", "number", "12"),
        ("true", "boolean", "true"),
        ("False", "boolean", "false"),
        ("1", "boolean", '"1"'),
        (' {"a":  1}\n', "object", '{"a":  1}'),
        ("{'a': [None]}", "object", '{"a": [null]}'),
        ("[1]", "object", '"[1]"'),
        ("null", "integer", '"null"'),
        ("x", "any", '"x"'),
        ("'ü'", "any", '"ü"'),
    ],
)
def test_a_value_is_of_its_type_or_stays_as_it_is(text: str, kind: str, written: str) -> None:
    assert to_json(text, frozenset({kind})) == written


def nested_unions(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (None, set()),
        ({}, set()),
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}]}]}, {"integer", "null"}),
        ({"$ref": "#/$defs/x"}, {"any"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"anyOf": 3, "type": {"x": 1}, "enum": 4}, set()),
        ({"type": 5}, set()),
        (nested_unions(3000), {"any"}),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    assert types_of(schema) == types


def test_halves_of_characters() -> None:
    assert without_halves("a\ud83c\udf7ab") == "a🍺b"
    assert without_halves("a\ud83cb\udf7a") == "a\ufffdb\ufffd"
    assert json.loads(quoted('"\n\\')) == '"\n\\'
