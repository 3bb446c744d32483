"""Tools whose schemas or grammars do not compile: which one it is and why, and not the grammar that
was made of them, which the client has never seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_service.core.params import ConstraintSpec
from frontend.calling import with_calls
from frontend.choosable import as_asked
from frontend.parsers.registry import output_format
from frontend.request import Chat, InputFormat, Options, TextRequest
from tests.unit.byte_grammars import byte_grammars
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported
from tidemill.structured import Constraint

GOOD = {"type": "object", "properties": {"a": {"type": "string"}}}
BAD = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "strng"}}}
ANSWER = Constraint("json_object", "", "response_format")
WRONG_ANSWER = Constraint("json_schema", json.dumps(BAD), "response_format")


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


TWO = (tool("f", GOOD), tool("g", BAD))


def refusal(
    folder: Path, asked: Constraint | None = None, form: str = "hermes", **chat: Any
) -> ServiceError:
    """What a client is told, whose request the engine's grammars refuse."""
    prompt = Chat(messages=[], **{"tools": TWO, **chat})
    request = TextRequest(prompts=(prompt,), options=Options(constraint=asked))
    made = with_calls(request, output_format(form, "none", None)).options.constraint
    assert made is not None
    with pytest.raises(InvalidRequest) as caught:
        byte_grammars(folder).open(ConstraintSpec(made.kind, made.text))
    return as_asked(caught.value, made, "")


@pytest.mark.parametrize(
    "asked",
    [
        {"must_call": True},
        {"must_call": True, "called": "g"},
        {},
        {"asked": ANSWER},
        {"form": "qwen3_coder", "tools": TWO[1:]},
    ],
)
def test_the_tool_is_named_and_its_fault(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Lines of a grammar that nobody had sent stood there, cut off before the tool's name."""
    told = refusal(tmp_path, **asked)
    words = "does not compile: Invalid type: strng. Correct it, or leave it out."
    assert told.message == f"What the tool 'g' takes {words}"
    assert (told.reason, told.param) == ("GRAMMAR_INVALID", "tools")


def test_an_answer_beside_tools_is_told_as_such(tmp_path: Path) -> None:
    told = refusal(tmp_path, WRONG_ANSWER, tools=TWO[:1])
    assert told.message.startswith("What response_format asks for does not compile: Invalid type")
    assert told.param == "response_format"


def test_a_fault_inside_of_a_call_by_tags_is_of_one_of_the_tools(tmp_path: Path) -> None:
    told = refusal(tmp_path, form="qwen3_coder")
    assert told.message.startswith("What one of the tools takes does not compile: Invalid type")


def test_a_wrong_input_of_free_form_is_told(tmp_path: Path) -> None:
    formats = {"f": InputFormat("lark", "start: nope")}
    told = refusal(tmp_path, tools=TWO[:1], must_call=True, called="f", input_formats=formats)
    assert told.message.startswith("What the tool 'f' takes does not compile: unknown name: ")
    assert "|" not in told.message


def test_a_grammar_that_the_client_wrote_is_told_with_its_lines(tmp_path: Path) -> None:
    spec = ConstraintSpec("ebnf", "start: a\na: nope\n")
    with pytest.raises(InvalidRequest, match=r"at 2.*unknown name.* 2 \| a: nope") as caught:
        byte_grammars(tmp_path).open(spec)
    told = as_asked(caught.value, Constraint("ebnf", spec.text, "guided_grammar"), "")
    assert (told.message, told.param) == (caught.value.message, "guided_grammar")


def test_a_method_without_grammars_is_told_in_the_clients_words() -> None:
    refused = Unsupported("no grammars (constraint.ebnf)", param="constraint.ebnf")
    told = as_asked(refused, Constraint("ebnf", "", "tool_choice", tools=("f",)), "")
    assert (told.message, told.param) == ("no grammars (tool_choice)", "tool_choice")
