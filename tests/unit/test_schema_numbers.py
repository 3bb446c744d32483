"""Whole numbers beyond 2^53 in schemas: what a grammar allows, the schema allows."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest

from engine_service.constraints.llguidance import MAX_TEXT, LlGrammars
from engine_service.constraints.schema_numbers import held_lark, held_schema
from tests.unit.test_grammars_kept import FOLDER, answer, spec
from tidemill.runtime.errors import InvalidRequest

pytest.importorskip("llguidance", reason="needs llguidance")
EDGE = 2**53
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.fixture(scope="module")
def grammars() -> LlGrammars:
    return LlGrammars(FOLDER, vocab_size=512, eos_token_ids=[0])


def takes(grammars: LlGrammars, kind: str, given: object, text: str) -> bool:
    return answer(grammars, grammars.open(spec(kind, given)), text) == f"{text}."


@pytest.mark.parametrize("bound", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_nothing_passes_that_the_schema_refuses(
    grammars: LlGrammars, bound: str, seed: int
) -> None:
    draw, taken = random.Random(seed), 0
    for _ in range(40):
        value = draw.randrange(EDGE - 4, EDGE + draw.choice([8, 2**54, 2**63]))
        value *= draw.choice([-1, 1])
        schema = {"type": "integer", bound: value}
        try:
            matcher = grammars.open(spec("json_schema", schema))
        except InvalidRequest:  # the library does not write every range of 19 digits
            continue
        # Around it, and as far away as float64 are from each other.
        for near in {value + step for step in (-2049, -3, -2, -1, 0, 1, 2, 3, 2049)}:
            text = str(near)
            found = answer(grammars, type(matcher)(matcher.matcher.deep_copy()), text)
            if found == f"{text}.":
                taken += 1
                jsonschema.validate(near, schema)
    assert taken > 40, "hardly anything passes"


@pytest.mark.parametrize("bound", [1e18, -1e18])
def test_an_exclusive_bound_excludes_itself_however_it_is_written(
    grammars: LlGrammars, bound: float
) -> None:
    key = "exclusiveMaximum" if bound > 0 else "exclusiveMinimum"
    assert not takes(grammars, "json_schema", {"type": "integer", key: bound}, str(int(bound)))


def test_control_the_library_alone_lets_pass_what_the_schema_refuses(
    grammars: LlGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "integer", "minimum": EDGE + 1, "title": "one of this test"}
    assert not takes(grammars, "json_schema", schema, str(EDGE))
    assert takes(grammars, "json_schema", schema, str(EDGE + 2))
    monkeypatch.setattr("engine_service.constraints.llguidance.held_text", lambda text: text)
    assert takes(grammars, "json_schema", schema | {"title": "another"}, str(EDGE))


def test_what_64_bits_hold_compiles_wherever_schemas_stand(grammars: LlGrammars) -> None:
    """Alone, in the grammar that calls are made of, and between tags; the library refuses it."""
    asked: dict[str, Any] = {
        "json_schema": {"type": "object", "properties": {"n": INT64}, "required": ["n"]},
        "ebnf": f'start: "a" %json {json.dumps(INT64)} "b"',
        "structural_tag": {
            "structures": [{"begin": "<a>", "schema": INT64, "end": "</a>"}],
            "triggers": ["<a"],
        },
    }
    texts = {"json_schema": '{"n": -5}', "ebnf": "a-5b", "structural_tag": "so <a>-5</a>"}
    for kind, given in asked.items():
        assert takes(grammars, kind, given, texts[kind]), kind


def of_tags(schema: object) -> dict[str, Any]:
    structure = {"begin": "<a>", "schema": schema, "end": "</a>"}
    return {"structures": [structure], "triggers": ["<a"]}


@pytest.mark.parametrize("schema", [True, {}])
def test_a_schema_that_is_true_takes_any_json_between_tags_too(
    grammars: LlGrammars, schema: object
) -> None:
    assert takes(grammars, "structural_tag", of_tags(schema), 'so <a>{"n": [5, null]}</a>')


@pytest.mark.parametrize("schema", [False, None, [], "integer", 5])
def test_a_schema_that_is_none_is_refused_by_what_may_stand_there(
    grammars: LlGrammars, schema: object
) -> None:
    words = "the schema of '<a>' is .*; it must be an object, or true for any JSON"
    with pytest.raises(InvalidRequest, match=words):
        grammars.compile(spec("structural_tag", of_tags(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": EDGE + 1},
        {"enum": ["a", EDGE + 1]},
        {"properties": {"a": {"const": {"b": [-(2**63) - 1]}}}},
        {"type": "integer", "multipleOf": EDGE + 1},
    ],
)
def test_a_value_that_would_be_another_is_refused(
    grammars: LlGrammars, schema: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=r"would be rounded; .* 9,007,199,254,740,992"):
        grammars.compile(spec("json_schema", schema))


def test_all_else_stays_as_it_is() -> None:
    schema = {
        "const": 2**60,
        "enum": [EDGE, 0.5, True, None, "9" * 30],
        "minimum": -EDGE,
        "maximum": 1e15,
        "default": EDGE + 1,
        "examples": [EDGE + 1],
        "properties": {"minimum": {"maximum": 2**60}, "const": {"type": "integer"}},
    }
    assert held_schema(schema) == schema
    named = {"properties": {"const": {"maximum": 2**63}, "minimum": {"const": {"maximum": 2**62}}}}
    held = held_schema(named)["properties"]
    assert held["const"] == {"maximum": 2**63 - 1024}, "a property of that name is a schema"
    assert held["minimum"] == named["properties"]["minimum"], "a value is none"
    grammar = 'start: %json {"const": 1} "%json {" %json [ /x/'
    assert held_lark(grammar) == grammar


@pytest.mark.parametrize("looks_like_one", ["%json [", '%json ["', "%json {"])
def test_what_looks_like_schemas_and_is_none_is_not_read_for_ever(
    grammars: LlGrammars, looks_like_one: str
) -> None:
    """A megabyte of it held a thread, and the interpreter, for 40 s."""
    text = looks_like_one * (MAX_TEXT // len(looks_like_one))
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="more than 100 %json are not JSON"):
        grammars.open(spec("ebnf", text))
    assert time.process_time() - began < 3.0
