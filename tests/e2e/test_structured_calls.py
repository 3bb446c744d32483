"""Calls that a grammar forces: the built-in models write them, and the parsers read them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from frontend.calling import call_constraint
from frontend.parsers.base import ToolSpec, parse_whole
from frontend.parsers.registry import OutputFormat
from frontend.parsers.tools.bare_json import CallListParser, NamedCallParser
from frontend.parsers.tools.hermes import HermesParser
from frontend.parsers.tools.pythonic import PythonicParser
from frontend.request import Chat
from tidemill.llm import LLM
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.sampling_params import SamplingParams, StructuredOutputsParams

POINT = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}}}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Point"}, "unit": {"enum": ["m", "km"]}},
    "required": ["at", "unit"],
    "additionalProperties": False,
    "$defs": {"Point": {**POINT, "required": ["x"], "additionalProperties": False}},
}
NAME: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS = {"go": PLACE, "greet": NAME}


def tools(*, strict: bool = False) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    )


def written(llm: LLM, chat: Chat, count: int) -> list[str]:
    constraint = call_constraint(chat, OutputFormat())
    assert constraint is not None
    assert constraint.param == "tool_choice"
    outputs = llm.generate(
        ["json: tom 31 rome"] * count,
        [
            SamplingParams(
                temperature=1.5,
                seed=seed,
                max_tokens=400,
                structured_outputs=StructuredOutputsParams(grammar=constraint.text),
            )
            for seed in range(count)
        ],
        use_tqdm=False,
    )
    ended = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert len(ended) > count / 2
    return [one.text for one in ended]


@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_forced_calls_follow_the_schemas(model: str) -> None:
    llm = LLM(model, max_model_len=512)
    specs = [ToolSpec(name, schema) for name, schema in SCHEMAS.items()]
    for offered in (tools(), tools()[:1], tools()[1:]):
        chat = Chat(messages=[], tools=offered, must_call=True, parallel_tool_calls=False)
        for text in written(llm, chat, 6):
            parsed = parse_whole(CallListParser(specs), text)
            (call,) = parsed.calls
            assert not parsed.content
            assert call.name in [tool["function"]["name"] for tool in offered]
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    named = Chat(messages=[], tools=tools(), must_call=True, called="go")
    for text in written(llm, named, 4):
        (call,) = parse_whole(NamedCallParser("go"), text).calls
        jsonschema.validate(json.loads(call.arguments), PLACE)


def matcher_of(constraint: Any) -> LLMatcher:
    folder = Path(__file__).parents[2] / "tidemill" / "builtin" / "demo"
    grammars = LlGrammars(str(folder), vocab_size=272, eos_token_ids=(257,))
    return grammars.open(ConstraintSpec(constraint.kind, constraint.text)).matcher


def accepts(constraint: Any, text: str) -> bool:
    """Whether a whole answer may be `text`."""
    folder = Path(__file__).parents[2] / "tidemill" / "builtin" / "demo"
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=272, eos_token=257)
    matcher = matcher_of(constraint)
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def test_several_calls_only_where_they_are_wanted() -> None:
    one = '{"name": "greet", "parameters": {"name": "Ada"}}'
    for is_parallel in (True, False):
        chat = Chat(messages=[], tools=tools(), must_call=True, parallel_tool_calls=is_parallel)
        constraint = call_constraint(chat, OutputFormat())
        assert accepts(constraint, f"[{one}]")
        assert accepts(constraint, f"[{one}, {one}]") == is_parallel
        assert not accepts(constraint, "[]")
        assert not accepts(constraint, f"[{one.replace('Ada', 'Lovelace')}]")


def test_strict_tools_are_called_by_their_schemas_amid_text() -> None:
    chat = Chat(messages=[], tools=tools(strict=True))
    constraint = call_constraint(chat, OutputFormat(tools=HermesParser))
    right = '<tool_call>\n{"name": "greet", "arguments": {"name": "Ada"}}\n</tool_call>'
    for text in ("I look.", f"I look. {right}", f"{right}\n{right} Done."):
        assert accepts(constraint, text)
        parsed = parse_whole(HermesParser([ToolSpec(n, s) for n, s in SCHEMAS.items()]), text)
        assert len(parsed.calls) == text.count("</tool_call>")
    for wrong in (right.replace("Ada", "Lovelace"), right.replace("greet", "bow"), right[:30]):
        assert not accepts(constraint, f"I look. {wrong}")


def test_strict_tools_of_other_formats_are_refused_by_name() -> None:
    chat = Chat(messages=[], tools=tools(strict=True))
    for form in (OutputFormat(), OutputFormat(tools=PythonicParser)):
        with pytest.raises(Unsupported, match="strict: true is served") as caught:
            call_constraint(chat, form)
        assert caught.value.param == "tools[0]"
    assert call_constraint(Chat(messages=[], tools=tools()), OutputFormat()) is None


@pytest.mark.parametrize("is_named", [True, False])
def test_words_that_no_grammar_holds_count_in_strict_tools_alone(is_named: bool) -> None:
    """Formats nobody knows, `not`, `uniqueItems`: schemas for validators are full of them."""
    llm = LLM("demo", max_model_len=512)
    odd = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5, "format": "first-name"},
            "tags": {"type": "array", "items": {"enum": [1]}, "maxItems": 1, "uniqueItems": True},
        },
        "not": {"required": ["nobody"]},
        "required": ["name"],
        "additionalProperties": False,
    }
    called = {"called": "greet"} if is_named else {}

    def chat(*, strict: bool) -> Chat:
        function = {"name": "greet", "parameters": odd, "strict": strict}
        return Chat(
            messages=[],
            tools=({"type": "function", "function": function},),
            must_call=True,
            parallel_tool_calls=False,
            **called,
        )

    for text in written(llm, chat(strict=False), 8):
        calls = [{"parameters": json.loads(text)}] if is_named else json.loads(text)
        for call in calls:
            jsonschema.validate(call["parameters"], odd)
    with pytest.raises(InvalidRequest, match=r"Unimplemented keys|Unknown format"):
        written(llm, chat(strict=True), 1)
