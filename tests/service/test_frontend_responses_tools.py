"""Reasoning and tool calls of /v1/responses, with its SDK; the engine is a fake that echoes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.service.frontends import stack
from tests.service.test_frontend_messages_tools import CALLS, FORCED, SAID, TEMPLATE

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"]
REASONED = ("reasoning", "hm é")
SPOKEN = ("message", "It is.")
CALLED = [("function_call", *pair) for pair in zip("fg", CALLS, strict=True)]


@asynccontextmanager
async def sdk(folder: Path, per_step: int = 1) -> AsyncIterator[tuple[Any, Any]]:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    engine = {"tokens_per_step": per_step, "max_model_len": 2048}
    async with (
        stack(folder, engine=engine, chat_template=str(template), **flags) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield served, client


def shown(response: Response) -> list[tuple[Any, ...]]:
    """The output, without the ids of calls."""
    found: list[tuple[Any, ...]] = []
    for item in response.output:
        assert item.status == "completed"  # type: ignore[union-attr]
        if item.type == "message":
            found.append(("message", item.content[0].text))  # type: ignore[union-attr]
        elif item.type == "reasoning":
            assert item.content is not None
            found.append(("reasoning", item.content[0].text))
        elif item.type == "function_call":
            found.append(("function_call", item.name, json.loads(item.arguments)))
    return found


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("per_step", [1, 4, 200])
async def test_reasoning_and_calls_are_items(tmp_path: Path, streams: bool, per_step: int) -> None:
    async with sdk(tmp_path, per_step) as (_, client):

        async def ask(**fields: Any) -> Response:
            wanted = {"model": "fake", "input": SAID, "tools": TOOLS, **fields}
            if not streams:
                return Response.model_validate(await client.responses.create(**wanted))
            async with client.responses.stream(**wanted) as stream:
                return Response.model_validate((await stream.get_final_response()).model_dump())

        every = await ask()
        first = await ask(parallel_tool_calls=False)
        none = await ask(tool_choice="none")
    assert shown(every) == [REASONED, SPOKEN, *CALLED]
    assert every.status == "completed"
    assert every.output_text == "It is."
    assert every.usage is not None
    assert every.usage.output_tokens_details.reasoning_tokens == len("hm é".encode())
    assert len({item.id for item in every.output}) == 4
    assert len({getattr(item, "call_id", 0) for item in every.output}) == 3
    assert shown(first) == [REASONED, SPOKEN, CALLED[0]]
    assert [kind for kind, *_ in shown(none)] == ["reasoning", "message"]
    assert '{"name": "g"' in none.output_text


@pytest.mark.parametrize("per_step", [1, 4, 200])
async def test_every_item_is_told_from_its_beginning_to_its_end(
    tmp_path: Path, per_step: int
) -> None:
    async with sdk(tmp_path, per_step) as (_, client):
        stream = await client.responses.create(model="fake", input=SAID, tools=TOOLS, stream=True)
        events = [event.to_dict() async for event in stream]
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", *["function_call"] * 2]
    for number, item in enumerate(output):
        told = [event for event in events if event.get("output_index") == number]
        kinds = [event["type"].removeprefix("response.") for event in told]
        name = {"reasoning": "reasoning_text", "message": "output_text"}.get(item["type"])
        word = name or "function_call_arguments"
        deltas = [event for event in told if event["type"] == f"response.{word}.delta"]
        part = ["content_part.added"] if name else []
        assert kinds == [
            "output_item.added",
            *part,
            *[f"{word}.delta"] * len(deltas),
            f"{word}.done",
            *(["content_part.done"] if name else []),
            "output_item.done",
        ]
        whole = item["content"][0]["text"] if name else item["arguments"]
        assert "".join(event["delta"] for event in deltas) == whole
        assert told[-1]["item"] == item
        assert {event["item_id"] for event in told if "item_id" in event} == {item["id"]}
        places = [events.index(event) for event in told]
        assert places == list(range(places[0], places[-1] + 1))


@pytest.mark.parametrize("chained", [False, True])
async def test_a_conversation_goes_on_behind_a_call(tmp_path: Path, chained: bool) -> None:
    async with sdk(tmp_path) as (served, client):
        first = await client.responses.create(model="fake", input=SAID, tools=TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": calls[1].call_id, "output": "x"},
            {
                "type": "function_call_output",
                "call_id": calls[0].call_id,
                "output": [{"type": "input_text", "text": "y"}],
            },
        ]
        given = outputs
        if not chained:
            given = [{"role": "user", "content": SAID}, *first.output, *outputs]
        previous = {"previous_response_id": first.id} if chained else {}
        await client.responses.create(
            model="fake", input=given, tools=TOOLS, max_output_tokens=1, **previous
        )
        counted = await client.responses.input_tokens.count(
            model="fake", input=given, tools=TOOLS, **previous
        )
        prompt = list(memoryview(served.engine.submits[-1].prompt_token_ids).cast("I"))
        one, two = (call.call_id for call in calls)
        text = (
            f"<|user|>{SAID}<|assistant|>(hm é)It is.[{one} f {CALLS[0]['a']}]"
            f"[{two} g {CALLS[1]['a']}]<|tool|>x[g {two}]<|tool|>y[f {one}]"
            "f:object g:object <|assistant|>"
        )
        assert prompt == served.tokenizer.encode(text).ids
        assert counted.input_tokens == len(prompt)


async def test_a_call_that_is_cut_off_keeps_what_came(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (served, client):
        said = SAID[: SAID.index('"}"')]
        response = await client.responses.create(
            model="fake",
            input=SAID,
            tools=TOOLS,
            max_output_tokens=len(served.tokenizer.encode(f"<|user|>{said}").ids),
        )
        more = await client.responses.create(
            model="fake", input="go on", previous_response_id=response.id, max_output_tokens=1
        )
    last = response.output[-1]
    assert (response.status, last.status, last.arguments) == (
        "incomplete",
        "incomplete",
        '{"a": [1, ',
    )
    assert more.status == "incomplete"


async def test_what_is_there_of_a_call_that_was_cut_off_is_an_object_for_the_template(
    tmp_path: Path,
) -> None:
    """Templates iterate over arguments; the same turn sent by the client is read the same way."""
    template = tmp_path / "template.jinja"
    each = "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    template.write_text(TEMPLATE.replace("{{ call.function.arguments.a }}", each))
    said = SAID[: SAID.index('"}"')]
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with stack(tmp_path, chat_template=str(template), **flags) as served:
        most = len(served.tokenizer.encode(f"<|user|>{said}").ids)
        body = {"model": "fake", "input": SAID, "tools": TOOLS, "max_output_tokens": most}
        async with served.http() as http:
            first = (await http.post("/v1/responses", json=body)).json()
            body |= {"input": "go on", "previous_response_id": first["id"]}
            more = await http.post("/v1/responses", json=body)
        assert more.status_code == 200, more.text
        prompt = list(memoryview(served.engine.submits[-1].prompt_token_ids).cast("I"))
    call_id = first["output"][-1]["call_id"]
    assert f"[{call_id} f a=[1]]" in served.tokenizer.decode(prompt, skip_special_tokens=False)


async def test_a_call_that_nests_too_deeply_does_not_end_the_next_response(tmp_path: Path) -> None:
    """Of more than 254 levels the writer of JSON makes an error; those of a turn count."""
    async with sdk(tmp_path) as (_, client):
        deep = f'{{"a": {300 * "["}{300 * "]"}}}'
        call = f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>'
        found = await client.responses.create(model="fake", input=f"{call}<|eos|>", tools=TOOLS)
        assert found.output[-1].arguments == deep
        more = await client.responses.create(
            model="fake", input="go on", previous_response_id=found.id, max_output_tokens=1
        )
    assert more.status == "incomplete"


async def test_a_forced_call_is_an_item(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (served, client):
        wanted: Any = {"model": "fake", "input": FORCED, "tools": TOOLS}
        found = await client.responses.create(**wanted, tool_choice="required")
        assert shown(found) == [("function_call", "g", CALLS[0])]
        assert '"[" call' in served.engine.submits[-1].constraint.ebnf
        named = {"type": "function", "name": "f"}
        wanted["input"] = '{"a": "é\\n"}<|eos|>'
        found = await client.responses.create(**wanted, tool_choice=named)
        assert shown(found) == [("function_call", "f", CALLS[1])]


@pytest.mark.parametrize("name", [None, 5, [], {}, "h"])
async def test_allowed_tools_are_those_that_are_offered(tmp_path: Path, name: object) -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": name}],
    }
    async with sdk(tmp_path) as (served, _), served.http() as http:
        body = {"model": "fake", "input": "a", "tools": TOOLS, "tool_choice": choice}
        answer = await http.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("function", {"function": {"name": "f"}}),
        ("custom", {}),
        ("web_search", {}),
        ("web_search", {"name": "f", "function": {"name": "f"}}),
    ],
)
async def test_how_a_tool_is_chosen_is_told_as_responses_have_it(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    """A tool of OpenAI's own that names a function, too, was taken for a choice of that."""
    wanted: Any = {"model": "fake", "input": "a", "tools": TOOLS}
    async with sdk(tmp_path) as (_, client):
        with pytest.raises(openai.BadRequestError, match="tool_choice must be") as caught:
            await client.responses.create(**wanted, tool_choice={"type": kind, **more})
    told = caught.value.body["message"]
    assert '{"type": "function", "name": ...}' in told
    assert ("type 'web_search' are not served" in told) == (kind == "web_search")
