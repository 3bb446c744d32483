"""langchain-openai: ChatOpenAI over both of OpenAI's APIs, OpenAI, OpenAIEmbeddings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

os.environ["LANGSMITH_TRACING"] = "false"

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

ASK = "json: tom 31 rome"
TOM = {"name": "tom", "age": 31, "city": "rome"}


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


@tool
def save_person(name: str, age: int, city: str) -> str:
    """Stores a person."""
    return f"saved {name}, {age}, {city}"


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """One loop for all cases: langchain keeps connections for all of its models."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def given(url: str) -> Any:
    return {"base_url": f"{url}/v1", "api_key": "any", "model": "demo", "max_retries": 0}


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, given: Any) -> ChatOpenAI:
    """The same model over chat completions and over responses."""
    return ChatOpenAI(**given, use_responses_api=request.param, timeout=60, stream_usage=True)


def test_whole_and_streamed(chat: ChatOpenAI, loop: asyncio.Runner) -> None:
    whole = chat.invoke([SystemMessage("Be brief."), HumanMessage(ASK)])
    assert Person.model_validate_json(whole.text) == Person(**TOM)
    usage = whole.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    added = AIMessageChunk("")
    for chunk in chat.stream([SystemMessage("Be brief."), HumanMessage(ASK)]):
        added += chunk
    assert added.text == whole.text
    assert added.usage_metadata["output_tokens"] == usage["output_tokens"]
    assert loop.run(chat.ainvoke([HumanMessage("reverse: harbour")])).text == "ruobrah"


def test_batches(chat: ChatOpenAI) -> None:
    answers = chat.batch(["reverse: harbour", "count: 37 n=5"])
    assert [one.text for one in answers] == ["ruobrah", "37 38 39 40 41"]


def test_tools(chat: ChatOpenAI) -> None:
    """A call that is forced, its result, and an answer to it."""
    forced = chat.bind_tools([save_person], tool_choice="save_person")
    turns: list[Any] = [HumanMessage(ASK)]
    turns.append(forced.invoke(turns))
    (call,) = turns[-1].tool_calls
    assert (call["name"], call["args"]) == ("save_person", TOM)
    result = save_person.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == "saved tom, 31, rome"
    free = chat.bind_tools([save_person]).invoke([*turns, result])
    assert free.text
    assert free.tool_calls == []
    added = AIMessageChunk("")
    for chunk in forced.stream([HumanMessage(ASK)]):
        added += chunk
    assert [one["args"] for one in added.tool_calls] == [TOM]
    anyone = chat.bind_tools([save_person], tool_choice="any", parallel_tool_calls=False)
    assert len(anyone.invoke(ASK).tool_calls) == 1


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_answers(chat: ChatOpenAI, method: Any) -> None:
    assert chat.with_structured_output(Person, method=method).invoke(ASK) == Person(**TOM)


def test_completions_and_embeddings(given: Any) -> None:
    assert "579" in OpenAI(**given, max_tokens=8, temperature=0).invoke("add: 123+456 =")
    texts = OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    (first, _), alone = texts.embed_documents(["tide", "mill"]), texts.embed_query("tide")
    assert first == pytest.approx(alone, abs=1e-5)
    ids = OpenAIEmbeddings(**given, tiktoken_enabled=False, check_embedding_ctx_length=False)
    assert ids.embed_query("tide") == pytest.approx(alone, abs=1e-5)


def test_errors(chat: ChatOpenAI, given: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        chat.invoke(ASK, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**{**given, "model": "gpt-9"}).invoke(ASK)
    with pytest.raises(ContextOverflowError):
        chat.invoke("a" * 3000)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    with pytest.raises(openai.BadRequestError, match="image"):
        chat.invoke([HumanMessage([image])])


def test_a_stream_that_is_closed(given: Any, abandoned: AbstractContextManager[None]) -> None:
    async def ask() -> None:
        chat = ChatOpenAI(**given, max_tokens=1900, extra_body={"ignore_eos": True})
        stream = chat.astream("ROMEO:")
        async for chunk in stream:
            if chunk.text:
                break
        await stream.aclose()

    with abandoned:
        asyncio.run(ask())  # its end is what closes the generators below langchain's own
