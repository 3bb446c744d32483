"""LiteLLM, under the names by which its users reach servers like this one."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AbstractContextManager
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks a server for prices

import litellm
import pytest

ASK: Any = [{"role": "user", "content": "json: tom 31 rome"}]
TOM = {"name": "tom", "age": 31, "city": "rome"}
NAMED = {"type": "function", "function": {"name": "save_person"}}


@pytest.fixture(params=["openai/demo", "hosted_vllm/demo"])
def asked(request: pytest.FixtureRequest, url: str) -> Any:
    """What every call has."""
    return {
        "model": request.param,
        "api_base": f"{url}/v1",
        "api_key": "any",
        "messages": ASK,
        "num_retries": 0,
        "max_retries": 0,
        "timeout": 60,
    }


@pytest.fixture
def tool(person: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": "save_person", "parameters": person}}


def test_whole_and_streamed(asked: Any) -> None:
    whole = litellm.completion(**asked)
    assert json.loads(whole.choices[0].message.content) == TOM
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def test_asynchronously(asked: Any) -> None:
    async def ask() -> str:
        stream = await litellm.acompletion(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert json.loads(asyncio.run(ask())) == TOM


def test_forced_calls(asked: Any, tool: Any) -> None:
    asked |= {"tools": [tool], "max_tokens": 300}
    whole = litellm.completion(**asked, tool_choice=NAMED)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("save_person", TOM)
    chunks = list(litellm.completion(**asked, tool_choice=NAMED, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == TOM
    one = litellm.completion(**asked, tool_choice="required", parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1
    turns = [*ASK, whole.choices[0].message.model_dump(), {
        "role": "tool", "tool_call_id": whole.choices[0].message.tool_calls[0].id, "content": "ok",
    }]  # fmt: skip
    free = litellm.completion(**{**asked, "messages": turns, "max_tokens": 20}, tool_choice="auto")
    assert free.choices[0].message.tool_calls is None


def test_structured_answers(asked: Any, person: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": person, "strict": True}}
    asked |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
    held = litellm.completion(**asked, response_format=form)
    assert json.loads(held.choices[0].message.content).keys() == TOM.keys()


def test_embeddings(url: str) -> None:
    given = {"api_base": f"{url}/v1", "api_key": "any", "input": ["tide", "mill"]}
    made = litellm.embedding(model="openai/demo", **given)
    assert [len(one["embedding"]) for one in made.data] == [len(made.data[0]["embedding"])] * 2


def test_anthropic_and_responses(asked: Any, url: str) -> None:
    """Its translations to the other two APIs."""
    given = {"api_base": url, "api_key": "any", "max_tokens": 60}
    message = litellm.completion(model="anthropic/demo", messages=ASK, **given)
    assert json.loads(message.choices[0].message.content) == TOM
    response = litellm.responses(
        model="openai/demo", input=ASK[0]["content"], api_base=f"{url}/v1", api_key="any"
    )
    assert json.loads(response.output_text) == TOM


def test_errors(asked: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature is -1"):
        litellm.completion(**asked, temperature=-1)
    with pytest.raises(litellm.BadRequestError, match=r"messages\[0\].role"):
        litellm.completion(**{**asked, "messages": [{"role": "wizard", "content": "hi"}]})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "a" * 3000}]})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": asked["model"] + "-9"})


def test_a_stream_that_is_closed(url: str, abandoned: AbstractContextManager[None]) -> None:
    async def ask() -> None:
        stream = await litellm.acompletion(
            model="openai/demo",
            api_base=f"{url}/v1",
            api_key="any",
            messages=[{"role": "user", "content": "ROMEO:"}],
            max_tokens=1900,
            extra_body={"ignore_eos": True},
            stream=True,
        )
        await anext(stream)
        await stream.completion_stream.response.aclose()

    with abandoned:
        asyncio.run(ask())
