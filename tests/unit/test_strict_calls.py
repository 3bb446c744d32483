"""Strict tools amid text, in every format that can be held to a schema: what its own parser reads
of an accepted answer follows the schema, and what does not follow it is not accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from frontend.calling import call_constraint
from frontend.parsers.base import ToolSpec, parse_whole
from frontend.parsers.registry import OutputFormat, output_format
from frontend.parsers.tools.glm import GlmParser
from frontend.parsers.tools.pythonic import PythonicParser
from frontend.request import Chat
from tests.unit.byte_grammars import accepts, byte_grammars
from tests.unit.test_parsers_round_trip import glm, hermes, qwen3_coder
from tidemill.runtime.errors import Unsupported

GO: dict[str, Any] = {
    "type": "object",
    "properties": {
        "to": {"type": "string"},
        "unit": {"enum": ["m", "km"]},
        "far": {"type": "integer", "maximum": 9},
        "at": {"$ref": "#/$defs/Point"},
        "note": {"type": ["string", "null"]},
        "level": {"enum": [1, 2, None]},
    },
    "required": ["to", "far"],
    "additionalProperties": False,
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"go": GO, "now": NOW, "free": {"type": "object"}}
FORMATS: dict[str, Callable[[Any], str]] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm45": glm,
}
RIGHT: list[list[tuple[str, dict[str, Any]]]] = [
    [("go", {"to": "Ü </x> 東\n", "far": 3})],
    [("go", {"to": "", "unit": "km", "far": -1, "at": {"x": 1.5}, "note": "n", "level": 2})],
    [("now", {}), ("go", {"to": "a", "far": 0, "level": None})],
    [("free", {"any": "thing"})],
]
WRONG: list[list[tuple[str, dict[str, Any]]]] = [
    [("go", {"to": "a"})],
    [("go", {"to": "a", "far": 10})],
    [("go", {"to": "a", "far": "x"})],
    [("go", {"to": "a", "unit": "mile", "far": 1})],
    [("go", {"to": "a", "far": 1, "at": {}})],
    [("go", {"to": "a", "far": 1, "level": 3})],
    [("go", {"to": "a", "far": 1, "more": 1})],
    [("now", {"a": "b"})],
    [("bow", {})],
]


def tools(schemas: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"type": "function", "function": {"name": n, "parameters": s, "strict": n != "free"}}
        for n, s in schemas.items()
    )


def spec_of(name: str, schemas: dict[str, Any]) -> ConstraintSpec:
    form = output_format(name, "none", None)
    constraint = call_constraint(Chat(messages=[], tools=tools(schemas)), form)
    assert constraint is not None
    return ConstraintSpec(constraint.kind, constraint.text)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> LlGrammars:
    folder: Path = tmp_path_factory.mktemp("bytes")
    return byte_grammars(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_follow_their_schemas(grammars: LlGrammars, name: str) -> None:
    spec, write = spec_of(name, SCHEMAS), FORMATS[name]
    specs = [ToolSpec(one, schema) for one, schema in SCHEMAS.items()]
    for calls in RIGHT:
        text = "I look, 1 < 2." + write(calls)
        assert accepts(grammars, spec, text), text
        assert accepts(grammars, spec, f"{text}\nDone."), text
        parser = output_format(name, "none", None).parser(specs, "")
        assert parser is not None
        read = parse_whole(parser, text).calls
        assert [(c.name, json.loads(c.arguments)) for c in read] == calls
        for call in read:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    for calls in WRONG:
        assert not accepts(grammars, spec, f"I look.{write(calls)}"), calls
    assert accepts(grammars, spec, "No call at all: <tool_cal")
    assert not accepts(grammars, spec, "I look.<tool_call>\n")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    "unit",
    [
        {"anyOf": [{"enum": ["c", "f"], "type": "string"}, {"type": "null"}]},
        {"oneOf": [{"const": "c"}, {"const": "f"}, {"const": None}]},
        {"type": ["string", "null"], "enum": ["c", "f", None]},
    ],
)
def test_optional_choices_are_held(grammars: LlGrammars, name: str, unit: dict[str, Any]) -> None:
    """As pydantic writes Optional[Literal["c", "f"]]."""
    schemas = {"f": {"type": "object", "properties": {"unit": unit}, "required": ["unit"]}}
    spec, write = spec_of(name, schemas), FORMATS[name]
    for said, read in (("c", "c"), ("f", "f"), (None, None)):
        text = write([("f", {"unit": said})])
        assert accepts(grammars, spec, text), text
        parser = output_format(name, "none", None).parser([ToolSpec("f", schemas["f"])], "")
        assert parser is not None
        (call,) = parse_whole(parser, text).calls
        assert json.loads(call.arguments) == {"unit": read}
    for wrong in ("kelvin", "", 5):
        assert not accepts(grammars, spec, write([("f", {"unit": wrong})])), wrong


def test_line_ends_of_glm_may_be_missing(grammars: LlGrammars) -> None:
    spec = spec_of("glm45", SCHEMAS)
    text = (
        "<tool_call>go<arg_key>to</arg_key><arg_value>a</arg_value><arg_key>far</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
    )
    assert accepts(grammars, spec, text)
    specs = [ToolSpec(one, schema) for one, schema in SCHEMAS.items()]
    read = [(c.name, c.arguments) for c in parse_whole(GlmParser(specs), text).calls]
    assert read == [("go", '{"to": "a", "far": 3}'), ("now", "{}")]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern of 'a' of 'f'"),
        ({"properties": {"a": {"enum": ["x", 1]}}}, "chosen of texts and other values"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}}},
         "pattern of 'a' of 'f'"),
        ({"properties": {"a": {"allOf": [{"type": "string", "maxLength": 2}]}}}, "maxLength of"),
        ({"properties": {"a": {"oneOf": [{"enum": ["x"]}, {"type": "string"}]}}}, "enum of 'a'"),
        ({"anyOf": [{"type": "object"}]}, "must be a plain object"),
        ({"properties": {"a": {}}, "required": None}, "`required` of 'f' must be a list"),
        ({"properties": {"a": {}}, "required": "a"}, "`required` of 'f' must be a list"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "`enum` of 'a' of 'f' must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(name: str, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        spec_of(name, {"f": schema})
    assert caught.value.param == "tools[0]"
    spec_of("hermes", {"f": schema})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_what_may_be_any_text_is_held_by_nothing_else(grammars: LlGrammars, name: str) -> None:
    """As pydantic writes str | Literal["auto"]."""
    unit = {"anyOf": [{"type": "string", "title": "x"}, {"enum": ["auto"], "type": "string"}]}
    schemas = {"f": {"type": "object", "properties": {"unit": unit}, "required": ["unit"]}}
    spec, write = spec_of(name, schemas), FORMATS[name]
    for said in ("auto", "anything"):
        assert accepts(grammars, spec, write([("f", {"unit": said})]))


@pytest.mark.parametrize("form", [OutputFormat(), OutputFormat(tools=PythonicParser)])
def test_other_formats_are_refused(form: OutputFormat) -> None:
    with pytest.raises(Unsupported, match="strict: true is served") as caught:
        call_constraint(Chat(messages=[], tools=tools(SCHEMAS)), form)
    assert caught.value.param == "tools[0]"
