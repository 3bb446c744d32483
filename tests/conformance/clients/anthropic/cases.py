"""Anthropic's Python SDK: messages, tools, counting, and what Claude Code sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "json: tom 31 rome"}]
TOM = {"name": "tom", "age": 31, "city": "rome"}
LONG = {"type": "string", "minLength": 1500}
"""No answer to it is over before its client has left, however slow that is."""
FORCED: Any = {"type": "tool", "name": "save_person"}


class Person(BaseModel):
    name: str
    age: int
    city: str


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture
def tool(person: dict[str, Any]) -> Any:
    return {"name": "save_person", "description": "Stores.", "input_schema": person}


def test_whole_and_streamed(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "max_tokens": 60, "messages": ASK, "system": "Be brief."}
    whole = client.messages.create(**asked)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "demo")
    assert json.loads(whole.content[0].text) == TOM
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        last = stream.get_final_message()
    assert last.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    cut = client.messages.create(**{**asked, "max_tokens": 3})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


def test_forced_calls(client: anthropic.Anthropic, tool: Any) -> None:
    asked: Any = {"model": "demo", "max_tokens": 300, "messages": ASK, "tools": [tool]}
    whole = client.messages.create(**asked, tool_choice=FORCED)
    (block,) = whole.content
    assert (block.type, block.name, block.input) == ("tool_use", "save_person", TOM)
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**asked, tool_choice=FORCED) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert json.loads("".join(pieces)) == streamed.input == TOM
    anyone = client.messages.create(
        **asked, tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert [one.input.keys() for one in anyone.content] == [TOM.keys()]
    free = client.messages.create(**asked, tool_choice={"type": "auto"})
    assert free.content[0].type == "text"


def test_results_go_back(client: anthropic.Anthropic, tool: Any) -> None:
    called = client.messages.create(
        model="demo", max_tokens=60, messages=ASK, tools=[tool], tool_choice=FORCED
    )
    result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "saved"}
    turns: Any = [
        *ASK,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "reverse: harbour"}]},
    ]
    answer = client.messages.create(model="demo", max_tokens=20, messages=turns, tools=[tool])
    assert answer.content[0].type == "text"


def test_structured_answers(client: anthropic.Anthropic, person: dict[str, Any]) -> None:
    parsed = client.messages.parse(model="demo", max_tokens=60, messages=ASK, output_format=Person)
    assert parsed.parsed_output == Person(**TOM)
    form: Any = {"format": {"type": "json_schema", "schema": person}}
    held = client.messages.create(
        model="demo",
        max_tokens=300,
        messages=[{"role": "user", "content": "hi"}],
        output_config=form,
    )
    assert json.loads(held.content[0].text).keys() == TOM.keys()


def test_counting(client: anthropic.Anthropic, tool: Any) -> None:
    for fields in ({}, {"tools": [tool]}, {"system": [{"type": "text", "text": "Be brief."}]}):
        asked: Any = {"model": "demo", "messages": ASK, **fields}
        counted = client.messages.count_tokens(**asked)
        usage = client.messages.create(**asked, max_tokens=1).usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_what_claude_code_sends(client: anthropic.Anthropic, tool: Any) -> None:
    """A turn in the middle of a session, with everything that asks for nothing here."""
    kept: Any = {"type": "ephemeral"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "save_person", "input": TOM}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok", "is_error": False}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    hidden = {"type": "redacted_thinking", "data": "b3BhcXVl"}
    asked: Any = {
        "model": "demo",
        "max_tokens": 1100,
        "system": [
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": "Be brief.", "cache_control": kept},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Save tom."}]},
            {"role": "assistant", "content": [thought, hidden, call]},
            {"role": "user", "content": [{**result, "cache_control": kept}]},
        ],
        "tools": [{**tool, "cache_control": kept, "eager_input_streaming": True}],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    betas = ["interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
    with client.beta.messages.stream(**asked, betas=betas) as stream:
        streamed = stream.get_final_message()
    whole = client.beta.messages.create(**asked, betas=betas)
    assert streamed.content[-1].text == whole.content[-1].text != ""
    assert whole.context_management.applied_edits == []
    assert streamed.context_management.applied_edits == []
    counted = {key: value for key, value in asked.items() if key not in ("max_tokens", "metadata")}
    assert client.beta.messages.count_tokens(**counted, betas=betas).input_tokens > 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"extra_body": {"temperature": -1}}, "temperature"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"messages": [{"role": "user", "content": "a" * 3000}]}, "prompt is too long: 3"),
    ({"thinking": {"type": "enabled", "budget_tokens": 60}, "max_tokens": 60}, "budget_tokens"),
]


@pytest.mark.parametrize(("fields", "words"), BAD)
def test_bad_requests(client: anthropic.Anthropic, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{"model": "demo", "max_tokens": 9, "messages": ASK, **fields})
    assert words in str(caught.value)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert caught.value.request_id


def test_what_does_not_exist(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="claude-9", max_tokens=9, messages=ASK)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").type == "model"


def test_a_stream_that_is_closed(
    client: anthropic.Anthropic, abandoned: AbstractContextManager[None]
) -> None:
    endless: Any = {"format": {"type": "json_schema", "schema": LONG}}
    with abandoned:
        stream = client.messages.create(
            model="demo",
            max_tokens=1900,
            messages=[{"role": "user", "content": "ROMEO:"}],
            output_config=endless,
            stream=True,
        )
        next(event for event in stream if event.type == "content_block_delta")
        stream.close()
