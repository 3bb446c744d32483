"""OpenAI's Python SDK: responses, whole, streamed, kept, in the background, with tools."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

ASK = "json: tom 31 rome"
TOM = {"name": "tom", "age": 31, "city": "rome"}
NAMED: Any = {"type": "function", "name": "save_person"}
_LONG = {"type": "string", "minLength": 1500}
STORY: Any = {
    "max_output_tokens": 1900,
    "text": {"format": {"type": "json_schema", "name": "story", "schema": _LONG}},
}
"""What is not over before its client has left, or cancels."""
PATIENCE_S = 60.0


class Person(BaseModel):
    name: str
    age: int
    city: str


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture
def tool(person: dict[str, Any]) -> Any:
    return {"type": "function", "name": "save_person", "parameters": person, "strict": True}


def test_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="demo", input=ASK)
    assert json.loads(whole.output_text) == TOM
    assert (whole.status, whole.error) == ("completed", None)
    with client.responses.create(model="demo", input=ASK, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.usage == whole.usage
    with client.responses.stream(model="demo", input=ASK) as stream:
        assert list(stream)
        assert stream.get_final_response().output_text == whole.output_text


def test_structured(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="demo", input=ASK, text_format=Person)
    assert parsed.output_parsed == Person(**TOM)


def test_calls_and_their_results(client: openai.OpenAI, tool: Any) -> None:
    first = client.responses.create(model="demo", input=ASK, tools=[tool], tool_choice=NAMED)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("save_person", TOM)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "saved"}
    by_id = client.responses.create(
        model="demo", input=[result], previous_response_id=first.id, max_output_tokens=20
    )
    said: Any = [{"role": "user", "content": ASK}, *first.output, result]
    by_items = client.responses.create(model="demo", input=said, max_output_tokens=20)
    assert by_id.output_text == by_items.output_text != ""
    with client.responses.stream(
        model="demo", input=ASK, tools=[tool], tool_choice="required", max_output_tokens=300,
        parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        done = [e for e in stream if e.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments).keys() for event in done] == [TOM.keys()]
    assert [event.name for event in done] == ["save_person"]


def test_kept(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input=ASK, metadata={"a": "b"})
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(
        model="demo",
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "reverse: harbour"}]}],
        previous_response_id=first.id,
    )
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message"] * 3
    assert [item.content[0].text for item in items] == [ASK, first.output_text, "reverse: harbour"]
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert len({item.id for item in items}) == 3
    newest = client.responses.input_items.list(second.id)
    assert [item.id for item in newest.data] == [item.id for item in reversed(items)]
    client.responses.delete(first.id)
    for lost in (client.responses.retrieve, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            lost(first.id)


def until_settled(client: openai.OpenAI, name: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (now := client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return now


def test_in_the_background(client: openai.OpenAI) -> None:
    queued = client.responses.create(model="demo", input=ASK, background=True)
    assert queued.background
    assert json.loads(until_settled(client, queued.id).output_text) == TOM
    long = client.responses.create(model="demo", input="ROMEO:", background=True, **STORY)
    cancelled = client.responses.cancel(long.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


def test_a_background_response_is_streamed_from_anywhere(client: openai.OpenAI) -> None:
    with client.responses.create(model="demo", input=ASK, background=True, stream=True) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    name = first.response.id
    with client.responses.retrieve(name, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert json.loads(events[-1].response.output_text) == TOM
    assert until_settled(client, name) == events[-1].response
    with client.responses.retrieve(name, stream=True, starting_after=4) as stream:
        assert [event.sequence_number for event in stream] == list(range(5, len(events)))


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="demo", input=ASK)
    made = client.responses.create(model="demo", input=ASK)
    assert counted.input_tokens == made.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": "a" * 3000}, "input"),
    ],
)
def test_bad_requests(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "demo", "input": ASK, **fields})
    assert caught.value.param == param


def test_what_does_not_exist(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input=ASK)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="demo", input=ASK, previous_response_id="resp_none")


def test_a_stream_that_is_closed(
    client: openai.OpenAI, abandoned: AbstractContextManager[None]
) -> None:
    with abandoned:
        stream = client.responses.create(model="demo", input="ROMEO:", stream=True, **STORY)
        next(event for event in stream if event.type == "response.output_text.delta")
        stream.close()
