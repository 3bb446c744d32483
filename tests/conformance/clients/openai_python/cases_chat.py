"""OpenAI's Python SDK: chats, completions, embeddings, models, errors, leaving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "json: tom 31 rome"}]
LONG: Any = [{"role": "user", "content": "ROMEO:"}]
TOM = {"name": "tom", "age": 31, "city": "rome"}
NAMED: Any = {"type": "function", "function": {"name": "save_person"}}
ENDLESS: Any = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}


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
    return {"type": "function", "function": {"name": "save_person", "parameters": person}}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=ASK, n=2, logprobs=True, top_logprobs=2
    )
    assert [json.loads(choice.message.content or "") for choice in answer.choices] == [TOM, TOM]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert (answer.object, answer.model) == ("chat.completion", "demo")
    scored = answer.choices[0].logprobs.content
    assert "".join(one.token for one in scored).startswith('{"name"')
    assert len(scored[0].top_logprobs) == 2
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens >= 2 * len(json.dumps(TOM))
    assert answer._request_id is not None
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="demo", messages=ASK, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert json.loads("".join(c.choices[0].delta.content or "" for c in chunks if c.choices)) == TOM
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 43)
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stream_with_the_sdks_own_accumulator(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=ASK, response_format=Person
    ) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert last.choices[0].message.parsed == Person(**TOM)


def test_forced_calls(client: openai.OpenAI, tool: Any) -> None:
    asked: Any = {"model": "demo", "messages": ASK, "tools": [tool], "max_tokens": 300}
    named = client.chat.completions.create(**asked, tool_choice=NAMED)
    (call,) = named.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("save_person", TOM)
    assert named.choices[0].finish_reason == "tool_calls"
    one = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    (call,) = one.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == TOM.keys()


def test_calls_in_a_stream(client: openai.OpenAI, tool: Any) -> None:
    tool["function"]["strict"] = True
    with client.chat.completions.stream(
        model="demo", messages=ASK, tools=[tool], tool_choice=NAMED
    ) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        last = stream.get_final_completion()
    assert [(event.name, json.loads(event.arguments)) for event in done] == [("save_person", TOM)]
    (call,) = last.choices[0].message.tool_calls
    assert call.id.startswith("call_")


def test_calls_and_results_go_back(client: openai.OpenAI, tool: Any) -> None:
    called = client.chat.completions.create(
        model="demo", messages=ASK, tools=[tool], tool_choice=NAMED
    )
    message = called.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "saved"}
    turns = [*ASK, message, result, {"role": "user", "content": "reverse: harbour"}]
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model="demo", messages=turns, tools=[tool], tool_choice=choice, max_tokens=20
        )
        assert answer.choices[0].message.content
        assert answer.choices[0].message.tool_calls is None


def test_the_newer_name_of_the_system(client: openai.OpenAI) -> None:
    """What SDKs send for models that reason; templates know it under the older name."""
    turns: Any = [{"role": "developer", "content": "Be brief."}, *ASK]
    answer = client.chat.completions.create(model="demo", messages=turns)
    older: Any = [{"role": "system", "content": "Be brief."}, *ASK]
    same = client.chat.completions.create(model="demo", messages=older)
    assert answer.choices[0].message.content == same.choices[0].message.content
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens


def test_structured_answers(client: openai.OpenAI, person: dict[str, Any]) -> None:
    parsed = client.chat.completions.parse(model="demo", messages=ASK, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(**TOM)
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": person, "strict": True},
    }
    asked: Any = [{"role": "user", "content": "hi"}]
    held = client.chat.completions.create(
        model="demo", messages=asked, response_format=form, max_tokens=300
    )
    assert json.loads(held.choices[0].message.content or "").keys() == TOM.keys()
    free = client.chat.completions.create(
        model="demo", messages=ASK, response_format={"type": "json_object"}
    )
    assert json.loads(free.choices[0].message.content or "") == TOM


def test_completions(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": ["add: 123+456 =", "sort: dbca ="], "max_tokens": 8}
    whole = client.completions.create(**asked, logprobs=1, echo=True)
    assert "579" in whole.choices[0].text
    assert "abcd" in whole.choices[1].text
    tokens = "".join(whole.choices[0].logprobs.tokens)
    assert tokens.removesuffix("<|eos|>") == whole.choices[0].text
    texts = ["", ""]
    for chunk in client.completions.create(**asked, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_embeddings(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model="demo", input=["tide", "mill"])  # as base64
    plain = client.embeddings.create(model="demo", input=["tide", "mill"], encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    cut = client.embeddings.create(model="demo", input="tide", dimensions=4)
    assert sum(x * x for x in cut.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert len(cut.data[0].embedding) == 4


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"


def says(content: Any, role: str = "user") -> Any:
    return {"messages": [{"role": role, "content": content}]}


NO_NAME = {"type": "function", "function": {"name": "a b"}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {}}
BAD: list[tuple[Any, str, str]] = [
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"messages": []}, "messages", "at least 1 item"),
    (says("hi", "wizard"), "messages[0].role", "system"),
    (says([{"type": "image_url"}]), "messages[0].content", "image_url"),
    ({"tools": [NO_NAME]}, "tools[0].function.name", "pattern"),
    ({"tool_choice": "required"}, "tool_choice", "tools has none"),
    ({"response_format": NO_SCHEMA}, "response_format", "schema"),
    (says("a" * 3000), "messages", "maximum context length"),
    ({"max_tokens": 5000}, "messages", "maximum context length"),
    ({"extra_body": {"lora_path": "x"}}, "lora_path", "not served"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_bad_requests(client: openai.OpenAI, fields: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "demo", "messages": ASK, **fields})
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_context_length_has_the_code_that_programs_look_for(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a" * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_what_does_not_exist(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    for wrong in (lambda: client.models.retrieve("gpt-9"), lambda: client.files.list()):
        with pytest.raises(openai.NotFoundError):
            wrong()


def test_errors_of_streams_are_raised_by_the_call(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=ASK, temperature=-1, stream=True)


def test_a_stream_that_is_closed(
    client: openai.OpenAI, abandoned: AbstractContextManager[None]
) -> None:
    with abandoned:
        stream = client.chat.completions.create(model="demo", messages=LONG, stream=True, **ENDLESS)
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        stream.close()


def test_a_call_that_is_given_up(
    url: str, busy: Callable[[], None], abandoned: AbstractContextManager[None]
) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            stream = await client.chat.completions.create(model="demo", messages=ASK, stream=True)
            assert [chunk async for chunk in stream]
            asked = client.chat.completions.create(model="demo", messages=LONG, **ENDLESS)
            call = asyncio.ensure_future(asked)
            await asyncio.to_thread(busy)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    with abandoned:
        asyncio.run(ask())
