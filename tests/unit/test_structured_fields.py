"""Structured outputs and forced calls in OpenAI bodies: every spelling arrives, wrong ones are
named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.test_schema import TOOL, chat, completion
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint

NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(("choice", "called"), [("required", ""), (NAMED, "f")])
def test_a_call_can_be_forced(choice: Any, called: str) -> None:
    (prompt,) = chat(tools=[TOOL], tool_choice=choice).prompts
    assert (prompt.must_call, prompt.called) == (True, called)
    (free,) = chat(tools=[TOOL]).prompts
    assert (free.must_call, free.called) == (False, "")
    for tools in ([], [{**TOOL, "function": {"name": "other"}}] if called else []):
        with pytest.raises(InvalidRequest, match="name one of its tools") as caught:
            chat(tools=tools, tool_choice=choice)
        assert caught.value.param == "tool_choice"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
AS_JSON = json.dumps(SCHEMA)
STRUCTURED: list[tuple[dict[str, object], str, str, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            }
        },
        "json_schema",
        AS_JSON,
        "response_format",
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        "structural_tag",
        json.dumps(TAG),
        "response_format",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", AS_JSON, "structured_outputs.json"),
    ({"structured_outputs": {"json": AS_JSON}}, "json_schema", AS_JSON, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        "choice",
        '["a", "b"]',
        "structured_outputs.choice",
    ),
    ({"structured_outputs": {"grammar": "g"}}, "ebnf", "g", "structured_outputs.grammar"),
    (
        {"structured_outputs": {"json_object": True}},
        "json_object",
        "",
        "structured_outputs.json_object",
    ),
    (
        {"structured_outputs": {"structural_tag": TAG}},
        "structural_tag",
        json.dumps(TAG),
        "structured_outputs.structural_tag",
    ),
    ({"guided_json": SCHEMA}, "json_schema", AS_JSON, "guided_json"),
    ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
    ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
    ({"guided_grammar": "g"}, "ebnf", "g", "guided_grammar"),
    ({"json_schema": AS_JSON}, "json_schema", AS_JSON, "json_schema"),
    ({"regex": "a"}, "regex", "a", "regex"),
    ({"ebnf": "g"}, "ebnf", "g", "ebnf"),
    ({"grammar": "g"}, "ebnf", "g", "grammar"),
]


@pytest.mark.parametrize(("fields", "kind", "text", "param"), STRUCTURED)
@pytest.mark.parametrize("ask", [chat, completion])
def test_every_spelling_of_a_grammar(
    ask: Any, fields: dict[str, object], kind: str, text: str, param: str
) -> None:
    assert ask(**fields).options.constraint == Constraint(kind, text, param)
    with pytest.raises(InvalidRequest, match="both say what the answer must be"):
        ask(**{"guided_regex": "x", "regex": "y", **fields})


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"response_format": {"type": "yaml"}}, InvalidRequest, "response_format"),
        ({"response_format": {"type": "json_schema"}}, InvalidRequest, "response_format"),
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            Unsupported,
            "response_format",
        ),
        ({"structured_outputs": {}}, InvalidRequest, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, InvalidRequest, None),
        ({"structured_outputs": {"backend": "x"}}, InvalidRequest, "structured_outputs.backend"),
        ({"guided_choice": []}, InvalidRequest, "guided_choice"),
    ],
)
def test_wrong_grammars_name_their_field(
    fields: dict[str, object], kind: type[Exception], param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        chat(**fields)
    assert caught.value.param == (param or "structured_outputs")  # type: ignore[attr-defined]
