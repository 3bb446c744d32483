"""Thinking and tool calls of the Anthropic face, with its SDK; the engine is a fake that echoes.

What the model says is what it is asked, up to the end token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from frontend.api.anthropic_schema import Turn
from frontend.api.anthropic_turns import to_messages
from tests.service.frontends import stack
from tidemill.runtime.errors import InvalidRequest

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments.a }}]{% endfor %}"
    "{% if message.role == 'tool' %}[{{ message.name }} {{ message.tool_call_id }}]{% endif %}"
    "{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}:{{ tool.function.parameters.type }} "
    "{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = [{"a": [1, "}"]}, {"a": "é\n"}]
SAID = (
    "<think>hm é</think>It is."
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
    '<tool_call>\n{"name": "g", "arguments": {"a": "é\\n"}}\n</tool_call><|eos|>'
)
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]
ADAPTIVE = {"type": "adaptive"}


@asynccontextmanager
async def sdk(folder: Path, per_step: int = 1) -> AsyncIterator[tuple[Any, Any]]:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    engine = {"tokens_per_step": per_step, "max_model_len": 2048}
    async with (
        stack(folder, engine=engine, chat_template=str(template), **flags) as served,
        anthropic.AsyncAnthropic(base_url=served.url, api_key="any", max_retries=0) as client,
    ):
        yield served, client


async def ask(client: Any, streams: bool, said: str, **fields: Any) -> Message:
    wanted = {"model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": said}]}
    if not streams:
        return Message.model_validate(await client.messages.create(**wanted, **fields))
    async with client.messages.stream(**wanted, **fields) as stream:
        return Message.model_validate(await stream.get_final_message())


def shown(message: Message) -> list[tuple[Any, ...]]:
    """The blocks, without the ids of calls."""
    found: list[tuple[Any, ...]] = []
    for block in message.content:
        if block.type == "text":
            found.append(("text", block.text))
        elif block.type == "thinking":
            found.append(("thinking", block.thinking))
        elif block.type == "tool_use":
            found.append(("tool_use", block.name, block.input))
    return found


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("per_step", [1, 4, 200])
async def test_thinking_and_calls_are_blocks(tmp_path: Path, streams: bool, per_step: int) -> None:
    calls = [("tool_use", name, value) for name, value in zip("fg", CALLS, strict=True)]
    async with sdk(tmp_path, per_step) as (_, client):
        every = await ask(client, streams, SAID, tools=TOOLS, thinking=ADAPTIVE)
        untold = await ask(client, streams, SAID, tools=TOOLS)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        first = await ask(client, streams, SAID, tools=TOOLS, tool_choice=choice)
        none = await ask(client, streams, SAID, tools=TOOLS, tool_choice={"type": "none"})
        ids = [block.id for block in every.content if block.type == "tool_use"]
    assert shown(every) == [("thinking", "hm é"), ("text", "It is."), *calls]
    assert every.stop_reason == "tool_use"
    assert len(set(ids)) == 2
    assert shown(untold) == [("text", "It is."), *calls]
    assert shown(first) == [("text", "It is."), calls[0]]
    assert none.stop_reason == "end_turn"
    assert [kind for kind, *_ in shown(none)] == ["text"]
    assert '{"name": "g"' in shown(none)[0][1]


async def test_a_call_that_is_cut_off_is_told_as_it_stands(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (served, client):
        said = SAID[: SAID.index('"}"')]
        num_tokens = len(served.tokenizer.encode(f"<|user|>{said}").ids)
        message = await client.messages.create(
            model="fake",
            max_tokens=num_tokens,
            messages=[{"role": "user", "content": SAID}],
            tools=TOOLS,
        )
    assert message.stop_reason == "max_tokens"
    (_, _, arguments) = shown(message)[-1]
    assert arguments == {"INVALID_JSON": '{"a": [1, '}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_a_stop_sequence_cuts_off_is_not_to_be_made(
    tmp_path: Path, streams: bool
) -> None:
    async with sdk(tmp_path) as (_, client):
        cut = await ask(client, streams, SAID, tools=TOOLS, stop_sequences=['}"]'])
        whole = await ask(client, streams, SAID, tools=TOOLS, stop_sequences=["</tool_call>"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", '}"]')
    assert shown(cut)[-1][:2] == ("tool_use", "f")
    assert whole.stop_reason == "tool_use"
    assert shown(whole) == [("text", "It is."), ("tool_use", "f", CALLS[0])]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_nests_too_deeply_is_told_as_it_stands(
    tmp_path: Path, streams: bool
) -> None:
    deep = f'{{"a": {300 * "["}{300 * "]"}}}'
    said = f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call><|eos|>'
    async with sdk(tmp_path, 50) as (served, _), served.http() as http:
        wanted = {"model": "fake", "max_tokens": 1000, "tools": TOOLS, "stream": streams}
        turn = {"role": "user", "content": said}
        answer = await http.post("/v1/messages", json={**wanted, "messages": [turn]})
    assert answer.status_code == 200, answer.text
    if streams:
        assert "event: message_stop" in answer.text
    else:
        (block,) = answer.json()["content"]
        assert block["input"] == {"INVALID_JSON": deep}


async def test_the_template_hears_of_everything(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 5}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {"a": 6}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": "x"},
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "y"}],
                    "is_error": True,
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    text = (
        "<|user|>q<|assistant|>(hm)t[1 f 5][2 g 6]<|tool|>x[g 2]<|tool|>y[f 1]<|user|>and?"
        "f:object g:object False<|assistant|>"
    )
    body = {
        "model": "fake",
        "messages": messages,
        "tools": TOOLS,
        "thinking": {"type": "disabled"},
    }
    async with sdk(tmp_path) as (served, client):
        await client.messages.create(**body, max_tokens=1)
        counted = await client.messages.count_tokens(**body)
        prompt = served.engine.submits[-1].prompt_token_ids
        expected = served.tokenizer.encode(text).ids
        unread = served.frontend.desk.model.template
    assert list(memoryview(prompt).cast("I")) == expected
    assert counted.input_tokens == len(expected)
    assert "enable_thinking" in unread.variables


FORCED = '[{"name": "g", "parameters": {"a": [1, "}"]}}]<|eos|>'


@pytest.mark.parametrize("streams", [False, True])
async def test_a_forced_call_is_a_block(tmp_path: Path, streams: bool) -> None:
    """What the model says under the grammar that the engine is asked for."""
    async with sdk(tmp_path) as (served, client):
        any_tool = {"tools": TOOLS, "tool_choice": {"type": "any"}}
        found = await ask(client, streams, FORCED, **any_tool)
        assert shown(found) == [("tool_use", "g", CALLS[0])]
        assert found.stop_reason == "tool_use"
        assert '"[" call (", " call)* "]"' in served.engine.submits[-1].constraint.ebnf
        one = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}
        found = await ask(client, streams, '{"a": "é\\n"}<|eos|>', **one)
        assert shown(found) == [("tool_use", "f", CALLS[1])]
        assert "start: %json" in served.engine.submits[-1].constraint.ebnf
        await ask(client, streams, SAID, tools=TOOLS)
        assert not served.engine.submits[-1].HasField("constraint")


@pytest.mark.parametrize("wrong", ["{}", "", [1], [], 5, 0, False])
def test_the_input_of_an_earlier_call_is_an_object(wrong: Any) -> None:
    """Templates go through its names, and failed on a text or wrote it in the place of JSON."""

    def told(**given: Any) -> Any:
        call = {"type": "tool_use", "id": "1", "name": "f", **given}
        result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
        turns = [Turn(role="assistant", content=[call]), Turn(role="user", content=[result])]
        return to_messages(turns)[0]["tool_calls"][0]["function"]["arguments"]

    with pytest.raises(InvalidRequest, match="input of a tool_use is of type") as refused:
        told(input=wrong)
    assert refused.value.param == "messages[0].content"
    assert told(input={"a": 1}) == {"a": 1}
    assert told(input=None) == told() == {}


def test_turns_of_one_role_are_one_message() -> None:
    """With thinking and calls too: templates want roles to take turns."""

    def call(name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": name, "name": name, "input": {}}

    def result(name: str) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": name, "content": name}

    turns = [
        Turn(role="user", content="q"),
        Turn(role="assistant", content="Let me look."),
        Turn(role="assistant", content=[call("a")]),
        Turn(role="assistant", content=[call("b")]),
        Turn(role="user", content=[result("a"), result("b")]),
        Turn(role="assistant", content=[{"type": "thinking", "thinking": "hm", "signature": ""}]),
        Turn(role="assistant", content="I s"),
    ]
    told = to_messages(turns)
    assert [one["role"] for one in told] == ["user", "assistant", "tool", "tool", "assistant"]
    assert told[1]["content"] == "Let me look."
    assert [one["function"]["name"] for one in told[1]["tool_calls"]] == ["a", "b"]
    assert (told[4]["reasoning_content"], told[4]["content"]) == ("hm", "I s")
