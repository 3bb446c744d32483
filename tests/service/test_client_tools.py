"""Tools through the Python clients, on a real server. The engine is a fake that echoes its prompt,
and the template a message: so a message is what the model says. What the model is told is compared
with what OpenAI's SDK, given the same, makes it be told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.service.fake_engine import unpack
from tests.service.frontends import Stack
from tests.service.test_frontend_tools import ANSWER, ARGUMENTS, CALL, WEATHER, sdk, serving
from tidemill.client import AsyncClient, Client
from tidemill.conversation import ToolCall
from tidemill.exchange import (
    CallOptions,
    Completion,
    Delta,
    chat_fields,
    infill_fields,
    text_fields,
)
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported
from tidemill.sampling_params import SamplingParams, StructuredOutputsParams

ALL = "{# <tool_call> <think></think> #}{{ {'messages': messages, 'tools': tools} | tojson }}"
"""A template that shows all that it is told."""
OPTIONS = CallOptions(tools=[WEATHER])
CALLED = {
    "type": "function",
    "id": "call_7",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "", "name": "house"},
    {"role": "user", "content": "Rain in Zürich?\n", "name": "Ada"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED, CALLED | {"id": "call_8"}]},
    {"role": "tool", "content": "yes", "tool_call_id": "call_7", "name": "get_weather"},
    {"role": "assistant", "content": "I look.", "reasoning": "Where?", "tool_calls": [CALLED]},
    {"role": "assistant", "content": "It rains.", "reasoning_content": "A city."},
]


def told(served: Stack) -> Any:
    """What the template was told for the last request."""
    text = served.tokenizer.decode(unpack(served.engine.submits[-1].prompt_token_ids))
    return json.loads(text)


def check_answer(answer: Completion) -> None:
    (choice,) = answer.choices
    assert (choice.text, choice.reasoning) == ("I look.", "Where? <b>")
    assert choice.finish_reason == "tool_calls"
    assert answer.tool_calls == choice.tool_calls
    found = [(call.index, call.name, call.arguments) for call in answer.tool_calls]
    assert found == [(i, "get_weather", ARGUMENTS) for i in range(2)]
    assert len({call.id for call in answer.tool_calls}) == 2


def check_stream(deltas: Iterable[Delta]) -> None:
    """Put together, the deltas are the answer; id and name come once, with a call's first part."""
    calls: list[dict[str, Any]] = []
    deltas = list(deltas)
    for part in (part for delta in deltas for part in delta.tool_calls):
        if part.index == len(calls):
            assert part.id
            calls.append({"id": part.id, "name": part.name, "arguments": ""})
        else:
            assert (part.id, part.name) == ("", "")
        calls[part.index]["arguments"] += part.arguments
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", ARGUMENTS)] * 2
    assert len({call["id"] for call in calls}) == 2
    choices = [delta.choice for delta in deltas if delta.choice]
    assert "".join(choice.text for choice in choices) == "I look."
    assert "".join(choice.reasoning for choice in choices) == "Where? <b>"
    assert "".join(choice.finish_reason for choice in choices) == "tool_calls"


@pytest.mark.parametrize("per_step", [1, 7, 500])
async def test_calls_are_answers_and_streams_of_both_clients(tmp_path: Path, per_step: int) -> None:
    def blocking(address: str) -> tuple[Completion, list[Delta]]:
        with Client(address) as client:
            whole = client.chat(ANSWER, options=OPTIONS)
            return whole, list(client.chat_stream(ANSWER, options=OPTIONS))

    engine = {"tokens_per_step": per_step}
    async with serving(tmp_path, engine=engine) as served:
        async with AsyncClient(served.grpc_address) as client:
            check_answer(await client.chat(ANSWER, options=OPTIONS))
            deltas = [d async for d in client.chat_stream(ANSWER, options=OPTIONS)]
        check_stream(deltas)
        answer, others = await asyncio.to_thread(blocking, served.grpc_address)
    check_answer(answer)
    check_stream(others)
    lost = max(i for i, delta in enumerate(deltas) if delta.tool_calls)
    with pytest.raises((AssertionError, IndexError)):  # the check can fail
        check_stream(deltas[:lost] + deltas[lost + 1 :])


async def test_the_model_is_told_the_same_as_over_http(tmp_path: Path) -> None:
    typed = ToolCall(index=0, id="call_7", name="get_weather", arguments=ARGUMENTS)
    said = [*SAID[:4], SAID[4] | {"tool_calls": [typed]}, *SAID[5:]]
    few, bare = SamplingParams(max_tokens=1), {"type": "function", "function": {"name": "f"}}
    async with (
        serving(tmp_path, ALL) as served,
        sdk(served) as http,
        AsyncClient(served.grpc_address) as client,
    ):
        create: Callable[..., Any] = http.chat.completions.create
        for tools in ([], [WEATHER], [bare, WEATHER]):
            await create(model="fake", messages=SAID, tools=tools, max_tokens=1)
            wanted = told(served)
            for messages in (SAID, said):
                await client.chat(messages, few, CallOptions(tools=tools))
                assert told(served) == wanted
        assert wanted["messages"][2]["tool_calls"][1]["id"] == "call_8"
        changes: list[tuple[int, dict[str, Any]]] = [
            (1, {"name": "Eve"}),
            (3, {"tool_call_id": "call_8"}),
            (4, {"reasoning": "Who?"}),
            (4, {"tool_calls": [CALLED | {"id": "call_9"}]}),
        ]
        for i, change in changes:  # the comparison can fail
            other = [*SAID[:i], SAID[i] | change, *SAID[i + 1 :]]
            await client.chat(other, few, CallOptions(tools=tools))
            assert told(served) != wanted


async def test_choices_of_tools(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, AsyncClient(served.grpc_address) as client:
        answer = await client.chat(ANSWER, options=CallOptions(tools=[WEATHER], tool_choice="none"))
        assert (answer.tool_calls, CALL in answer.text) == ([], True)
        one = CallOptions(tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False)
        assert len((await client.chat(ANSWER, options=one)).tool_calls) == 1
        parts = [
            part async for d in client.chat_stream(ANSWER, options=one) for part in d.tool_calls
        ]
        assert {part.index for part in parts} == {0}
        named = {"type": "function", "function": {"name": "get_weather"}}
        listed = json.dumps([{"name": "get_weather", "parameters": {"city": "Zug"}}] * 2)
        for choice, said, count in (("required", listed, 2), (named, '{"city": "Zug"}', 1)):
            forced = CallOptions(tools=[WEATHER], tool_choice=choice)
            answer = await client.chat(said, options=forced)
            calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
            assert calls == [("get_weather", {"city": "Zug"})] * count
            assert (answer.text, answer.choices[0].finish_reason) == ("", "tool_calls")
            asked = served.engine.submits[-1].constraint
            assert json.dumps(WEATHER["function"]["parameters"])[1:-1] in asked.ebnf
            assert ("get_weather" in asked.ebnf) == (choice == "required")
            also = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
            with pytest.raises(InvalidRequest, match="leave out one of them") as refused:
                await client.chat(said, also, forced)
            assert refused.value.param == "tool_choice"
        written = "<think>{}</think>[]"
        free = await client.chat(written)
        assert (free.text, free.choices[0].reasoning) == ("[]", "{}")
        assert not served.engine.submits[-1].HasField("reasoning")
        held = SamplingParams(structured_outputs=StructuredOutputsParams(json={}), max_tokens=99)
        bound = await client.chat(written, held)
        assert (bound.text, bound.choices[0].reasoning) == ("[]", "{}")
        asked = served.engine.submits[-1].reasoning
        assert (asked.start, asked.end) == ("<think>", "</think>")
        strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
        await client.chat("a", options=CallOptions(tools=[strict]))
        tag = json.loads(served.engine.submits[-1].constraint.structural_tag)
        assert tag["triggers"] == ["<tool_call>"]
        assert "get_weather" in tag["structures"][0]["begin"]
        with pytest.raises(InvalidRequest, match="two tools are called"):
            await client.chat("a", options=CallOptions(tools=[WEATHER, WEATHER]))
        for kind in ("string", ["array", "null"]):
            text = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
            with pytest.raises(InvalidRequest, match="arguments are an object") as refused:
                await client.chat("a", options=CallOptions(tools=[WEATHER, text]))
            assert refused.value.param == "tools[1].function.parameters"
        parameters = {"type": ["object", "null"], "properties": {}}
        either = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        await client.chat("a", options=CallOptions(tools=[either], tool_choice="required"))
        assert '"type": "object"' in served.engine.submits[-1].constraint.ebnf
        assert "null" not in served.engine.submits[-1].constraint.ebnf


async def test_a_conversation_goes_on_with_what_the_tools_say(tmp_path: Path) -> None:
    """The loop of the client's documentation."""
    async with serving(tmp_path) as served, AsyncClient(served.grpc_address) as client:
        said: list[dict[str, Any]] = [{"role": "user", "content": CALL}]
        while calls := (answer := await client.chat(said, options=OPTIONS)).tool_calls:
            said.append({"role": "assistant", "content": answer.text, "tool_calls": calls})
            for call in calls:
                assert json.loads(call.arguments) == {"city": "Zürich }"}
                said.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    assert answer.text == "It rains."
    assert len(said) == 3


@pytest.mark.parametrize(
    ("message", "kind", "param"),
    [
        ("role", InvalidRequest, "messages[0]"),
        ({"content": "a"}, InvalidRequest, "messages[0].role"),
        ({"role": "user"}, InvalidRequest, "messages[0].content"),
        ({"role": "user", "content": [{"text": "a"}]}, InvalidRequest, "messages[0].content"),
        ({"role": "tool", "content": "a", "name": 1}, InvalidRequest, "messages[0].name"),
        ({"role": "user", "content": "a", "audio": {}}, Unsupported, "messages[0].audio"),
        ({"tool_calls": ["a"]}, InvalidRequest, "messages[0].tool_calls[0]"),
        ({"tool_calls": [{"id": "a"}]}, InvalidRequest, "messages[0].tool_calls[0].function"),
        (
            {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]},
            InvalidRequest,
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"tool_calls": [CALLED | {"id": None}]},
            InvalidRequest,
            "messages[0].tool_calls[0].id",
        ),
    ],
)
def test_messages_that_cannot_be_sent_are_named(
    message: Any, kind: type[ServiceError], param: str
) -> None:
    if "tool_calls" in message:
        message = {"role": "assistant", **message}
    with pytest.raises(kind) as refused:
        chat_fields([message], None, None)
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("tool", "kind", "param"),
    [
        ("type", InvalidRequest, "tools[0]"),
        ({"type": "web_search"}, Unsupported, "tools[0].type"),
        ({"type": "function", "name": "f"}, Unsupported, "tools[0].name"),
        ({"type": "function"}, InvalidRequest, "tools[0].function"),
        ({"function": {"description": "a"}}, InvalidRequest, "tools[0].function.name"),
        ({"function": {"name": "f", "x": 1}}, Unsupported, "tools[0].function.x"),
        ({"function": {"name": "f", "strict": 0}}, InvalidRequest, "tools[0].function.strict"),
        (
            {"function": {"name": "f", "description": 1}},
            InvalidRequest,
            "tools[0].function.description",
        ),
        (
            {"function": {"name": "f", "parameters": {"least": float("nan")}}},
            InvalidRequest,
            "tools[0].function.parameters",
        ),
        (
            {"function": {"name": "f", "parameters": {"enum": {1}}}},
            InvalidRequest,
            "tools[0].function.parameters",
        ),
    ],
)
def test_tools_that_cannot_be_sent_are_named(
    tool: Any, kind: type[ServiceError], param: str
) -> None:
    with pytest.raises(kind) as refused:
        chat_fields("a", None, CallOptions(tools=[tool]))
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("template", {"a": 1}),
        ("tools", [WEATHER]),
        ("tool_choice", "none"),
        ("parallel_tool_calls", False),
        ("echo", True),
    ],
)
def test_options_are_refused_where_nobody_reads_them(name: str, value: Any) -> None:
    options = CallOptions(**{name: value})
    calls: list[Callable[[], Any]] = [lambda: infill_fields(("a", "b"), None, options)]
    if name == "echo":
        calls.append(lambda: chat_fields("a", None, options))
        text_fields("a", None, options)
    else:
        calls.append(lambda: text_fields("a", None, options))
        chat_fields("a", None, options)
    for call in calls:
        with pytest.raises(InvalidRequest, match=f"does not read {name}") as refused:
            call()
        assert refused.value.param == name


def test_a_choice_that_is_none_is_named() -> None:
    for choice in ({"type": "function"}, {"function": {"name": 1}}):
        with pytest.raises(InvalidRequest, match=r"tool_choice\.function"):
            chat_fields("a", None, CallOptions(tools=[WEATHER], tool_choice=choice))
