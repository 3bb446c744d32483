"""Grammars that the library's recursion ends on: they end their request, and never the process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine_service.constraints.deep_stack import on_deep_stack
from engine_service.constraints.schema_numbers import held_schema
from tests.unit.test_grammars_kept import FOLDER

BELOW = {"type": "integer", "minimum": -1e300, "maximum": -1e299}
"""Of which the library makes a range that ends where 64 bits do."""
COMPILE = """
import json, sys
from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from tidemill.runtime.errors import InvalidRequest

grammars = LlGrammars(sys.argv[1], vocab_size=272, eos_token_ids=[0])
for kind, text in json.load(sys.stdin):
    try:
        matcher = grammars.open(ConstraintSpec(kind, text))
        assert any(grammars.masks([matcher])[0]), text
        print("open")
    except InvalidRequest as refused:
        print(refused.message)
"""


def told(given: list[tuple[str, object]]) -> list[str]:
    """What becomes of each in a process of their own, which must outlive them."""
    pytest.importorskip("llguidance", reason="needs llguidance")
    texts = [(kind, one if isinstance(one, str) else json.dumps(one)) for kind, one in given]
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, FOLDER],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, f"ended with {ran.returncode}: {ran.stderr[-500:]}"
    return ran.stdout.splitlines()


@pytest.mark.parametrize(
    "schema",
    [
        BELOW,
        {"type": "integer", "exclusiveMinimum": -1e300, "exclusiveMaximum": -1e299},
        {"type": "integer", "minimum": float(-(2**63)), "maximum": float(-(2**63))},
        {"allOf": [{"type": "integer", "minimum": -1e300}, {"maximum": -1e299}]},
        {"$ref": "#/default", "default": BELOW},
        {"$ref": "#/%64efault", "default": BELOW},
        {"properties": {"a": {"$ref": "#/properties/b/enum/0"}, "b": {"enum": [BELOW]}}},
        {"properties": {"a": {"$ref": "#/properties/properties/const"},
                        "properties": {"const": BELOW}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_range_below_64_bits_is_refused(schema: dict[str, Any]) -> None:
    (said,) = told([("json_schema", schema)])
    assert "does not compile" in said


def test_it_is_refused_inside_of_a_lark_grammar() -> None:
    (said,) = told([("ebnf", f"start: %json {json.dumps(BELOW)}")])
    assert "does not compile" in said


@pytest.mark.parametrize("bound", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_bounds_that_no_float_holds_are_read(bound: str) -> None:
    """400 digits, which JSON may have: too large for a float64."""
    far, near = (10**400, -(10**400)) if "ax" in bound else (-(10**400), 10**400)
    open_ended, impossible = told(
        [("json_schema", {"type": "integer", bound: one}) for one in (far, near)]
    )
    assert open_ended == "open"
    assert "does not compile" in impossible


def test_definitions_may_have_the_names_of_keywords() -> None:
    named = {name: {"type": "integer"} for name in ("default", "enum", "const", "properties")}
    schema = {"properties": {n: {"$ref": f"#/$defs/{n}"} for n in named}, "$defs": named}
    assert held_schema(schema) == schema


def chain(make: Callable[[dict[str, Any]], dict[str, Any]], length: int) -> dict[str, Any]:
    """A schema that refers to one that refers to one, and so on."""
    named = {f"a{i}": make({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": named | {f"a{length}": {"type": "integer"}}}


@pytest.mark.parametrize("length", [3000, 9000])
def test_schemas_that_refer_to_each_other_in_a_long_row_compile_or_are_refused(
    length: int,
) -> None:
    makes: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
        lambda other: other,
        lambda other: {"type": "array", "items": other},
        lambda other: {"anyOf": [other, {"type": "null"}]},
        lambda other: {"allOf": [other, {"title": "a"}]},
        lambda other: {"type": "object", "properties": {"p": other}, "required": ["p"]},
    ]
    said = told([("json_schema", chain(make, length)) for make in makes])
    assert said[0] == "open"
    assert all(one == "open" or "does not compile" in one for one in said), said


def test_a_call_on_a_deep_stack_raises_and_returns_as_if_it_were_none() -> None:
    before = threading.stack_size()
    assert on_deep_stack(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(divmod, 7, 0)
    assert threading.stack_size() == before
