"""Tools of free form of /v1/responses, with its SDK; the engine is a fake that echoes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.service.test_frontend_responses_tools import EVENT, sdk

LARK = 'start: "+" /[a-z]+/'
EDIT = {"type": "custom", "name": "edit", "description": "Edits."}
BY_LARK = {**EDIT, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
BY_REGEX = {**EDIT, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z/]+"}}
F = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TEXT = 'é\n"a" }'


def says(*calls: tuple[str, Any]) -> str:
    """A message that the fake engine says again."""
    written = (json.dumps({"name": n, "arguments": a}) for n, a in calls)
    return "".join(f"<tool_call>{one}</tool_call>" for one in written) + "<|eos|>"


def prompt_of(served: Any) -> str:
    ids = memoryview(served.engine.submits[-1].prompt_token_ids).cast("I")
    return str(served.tokenizer.decode(list(ids), skip_special_tokens=False))


@pytest.mark.parametrize("per_step", [1, 3, 200])
async def test_a_call_is_an_item_with_its_input(tmp_path: Path, per_step: int) -> None:
    said = says(("edit", {"input": TEXT}), ("f", {"input": TEXT}))
    wanted: Any = {"model": "fake", "input": said, "tools": [EDIT, F]}
    async with sdk(tmp_path, per_step) as (_, client):
        whole = await client.responses.create(**wanted)
        stream = await client.responses.create(**wanted, stream=True)
        events = [event.to_dict() async for event in stream]
    called, other = whole.output
    assert (called.type, called.name, called.input) == ("custom_tool_call", "edit", TEXT)
    assert (other.type, json.loads(other.arguments)) == ("function_call", {"input": TEXT})
    assert [tool.type for tool in whole.tools] == ["custom", "function"]
    for event in events:
        EVENT.validate_python(event)
    told = [event for event in events if event.get("output_index") == 0]
    deltas = [e["delta"] for e in told if e["type"] == "response.custom_tool_call_input.delta"]
    assert [event["type"].removeprefix("response.") for event in told] == [
        "output_item.added",
        *["custom_tool_call_input.delta"] * len(deltas),
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert "".join(deltas) == told[-2]["input"] == told[-1]["item"]["input"] == TEXT
    assert told[0]["item"]["input"] == ""
    assert events[-1]["response"]["output"][0]["input"] == TEXT


@pytest.mark.parametrize("chained", [False, True])
async def test_the_conversation_goes_on(tmp_path: Path, chained: bool) -> None:
    said = says(("edit", {"input": "x y"}))
    async with sdk(tmp_path) as (served, client):
        first = await client.responses.create(model="fake", input=said, tools=[EDIT])
        (call,) = first.output
        given: list[Any] = [
            {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
        ]
        if not chained:
            given = [{"role": "user", "content": said}, *first.output, *given]
        previous = {"previous_response_id": first.id} if chained else {}
        again = await client.responses.create(
            model="fake", input=given, tools=[EDIT], max_output_tokens=1, **previous
        )
        kept = await client.responses.input_items.list(again.id, order="asc")
        turn = f"[{call.call_id} edit ]<|tool|>done[edit {call.call_id}]edit:object <|assistant|>"
        assert prompt_of(served).endswith(turn)
        kinds = [item.type for item in kept.data]
        assert kinds[-2:] == ["custom_tool_call", "custom_tool_call_output"]


async def test_a_named_call_is_the_text_by_the_grammar(tmp_path: Path) -> None:
    named = {"type": "custom", "name": "edit"}
    async with sdk(tmp_path) as (served, client):
        for tool, ebnf in ((BY_LARK, LARK), (BY_REGEX, r"start: /[a-z\/]+/" + "\n")):
            found = await client.responses.create(
                model="fake", input=f"{TEXT}<|eos|>", tools=[tool], tool_choice=named
            )
            (call,) = found.output
            assert (call.type, call.input) == ("custom_tool_call", TEXT)
            assert served.engine.submits[-1].constraint.ebnf == ebnf
        await client.responses.create(
            model="fake", input="a<|eos|>", tools=[EDIT], tool_choice=named
        )
        assert '"required": ["input"]' in served.engine.submits[-1].constraint.ebnf


async def test_calls_amid_text_are_held_to_a_regex(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (served, client):
        await client.responses.create(model="fake", input="a<|eos|>", tools=[BY_REGEX])
        (structure,) = json.loads(served.engine.submits[-1].constraint.structural_tag)["structures"]
        assert structure["schema"]["properties"]["input"]["pattern"] == "^(?:[a-z/]+)$"
        await client.responses.create(model="fake", input="a<|eos|>", tools=[EDIT])
        assert not served.engine.submits[-1].HasField("constraint"), "control"


async def test_only_allowed_tools_are_told_of(tmp_path: Path) -> None:
    choice: Any = {"type": "allowed_tools", "tools": [{"type": "custom", "name": "edit"}]}
    async with sdk(tmp_path) as (served, client):
        edit = {**EDIT, "async": False, "allowed_callers": ["direct"]}
        wanted: Any = {"model": "fake", "input": "a<|eos|>", "tools": [F, edit]}
        await client.responses.create(**wanted)
        assert prompt_of(served).endswith("f:object edit:object <|assistant|>"), "control"
        await client.responses.create(**wanted, tool_choice={**choice, "mode": "auto"})
        assert prompt_of(served).endswith("<|eos|>edit:object <|assistant|>")
        assert not served.engine.submits[-1].HasField("constraint")
        await client.responses.create(**wanted, tool_choice={**choice, "mode": "required"})
        ebnf = served.engine.submits[-1].constraint.ebnf
        assert "edit" in ebnf
        assert '\\"f\\"' not in ebnf


def by(**fields: Any) -> dict[str, Any]:
    return {"tools": [{**EDIT, "format": {"type": "grammar", "syntax": "lark", **fields}}]}


WRONG = {
    "lark amid text": ({"tools": [BY_LARK]}, "tools[0]"),
    "lark among several": ({"tools": [BY_LARK], "tool_choice": "required"}, "tools"),
    "syntax": (by(syntax="gbnf", definition="a"), "tools[0].format"),
    "no definition": (by(), "tools[0].format"),
    "format": ({"tools": [{**EDIT, "format": {"type": "json"}}]}, "tools[0].format"),
    "parameters of text": ({"tools": [{**EDIT, "parameters": {}}]}, "tools[0].parameters"),
    "a format of parameters": ({"tools": [{**F, "format": {"type": "text"}}]}, "tools[0].format"),
    "async": ({"tools": [F, {**EDIT, "async": True}]}, "tools[1].async"),
    "deferred": ({"tools": [{**F, "defer_loading": True}]}, "tools[0].defer_loading"),
    "callers": (
        {"tools": [{**F, "allowed_callers": ["programmatic"]}]},
        "tools[0].allowed_callers",
    ),
    "no name": ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    "a search": ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    "an unknown choice": (
        {"tools": [EDIT], "tool_choice": {"type": "custom", "name": "g"}},
        "tool_choice",
    ),
    "nothing allowed": (
        {"tools": [EDIT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice",
    ),
    "another allowed": (
        {
            "tools": [EDIT],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]},
        },
        "tool_choice",
    ),
    "a call without its name": (
        {"input": [{"type": "custom_tool_call", "call_id": "1", "input": "a"}]},
        "input[0].name",
    ),
}


async def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (served, client):
        for case, (fields, param) in WRONG.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**{"model": "fake", "input": "a", **fields})
            assert caught.value.param == param, case
        assert not served.engine.submits
