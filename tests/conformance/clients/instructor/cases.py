"""instructor: pydantic models out of OpenAI's and Anthropic's APIs, in the ways it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel, Field, field_validator

ASK: Any = [{"role": "user", "content": "json: tom 31 rome"}]
MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
]


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as opened:
        yield opened


def asked(**fields: Any) -> Any:
    return {"model": "demo", "messages": ASK, "max_retries": 0, "temperature": 0, **fields}


@pytest.mark.parametrize("mode", MODES)
def test_whole(client: openai.OpenAI, mode: instructor.Mode) -> None:
    """What instructor writes around the question is not what `demo` knows: the schema holds it."""
    found = instructor.from_openai(client, mode=mode).create(**asked(response_model=Person))
    assert isinstance(found, Person)


def test_any_object(client: openai.OpenAI) -> None:
    class Anything(BaseModel, extra="allow"):
        pass

    made = instructor.from_openai(client, mode=instructor.Mode.JSON)
    assert made.create(**asked(response_model=Anything)).model_dump()


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_streamed(client: openai.OpenAI, mode: instructor.Mode) -> None:
    """A model that is filled while it is written. Its last field is long: a server merges what a
    slow reader has not read, and a few steps may come as one."""

    class Letter(BaseModel):
        name: str = Field(max_length=20)
        text: str = Field(min_length=500)

    made = instructor.from_openai(client, mode=mode)
    parts = list(made.create_partial(**asked(response_model=Letter, max_tokens=1200)))
    last = Letter(**parts[-1].model_dump())
    assert any(part.name == last.name and part.text != last.text for part in parts)


def test_anthropic(url: str) -> None:
    given = {"model": "demo", "messages": ASK, "max_retries": 0, "max_tokens": 200}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        made = instructor.from_anthropic(client, mode=instructor.Mode.TOOLS)
        assert isinstance(made.create(**given, response_model=Person), Person)


def test_what_does_not_validate_is_asked_again(client: openai.OpenAI) -> None:
    """The conversation grows by the call and what was wrong with it."""

    class Nobody(BaseModel):
        name: str = Field(max_length=6)

        @field_validator("name")
        @classmethod
        def refuse(cls, name: str) -> str:
            raise ValueError(f"{name} is nobody")

    with pytest.raises(InstructorRetryException) as caught:
        instructor.from_openai(client).create(**asked(response_model=Nobody, max_retries=1))
    assert caught.value.n_attempts == 2


def test_errors(client: openai.OpenAI) -> None:
    made = instructor.from_openai(client)
    for fields, kind in (
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "gpt-9"}, openai.NotFoundError),
    ):
        with pytest.raises(InstructorRetryException) as caught:
            made.create(**asked(response_model=Person, **fields))
        assert kind.__name__ in repr(caught.value.__cause__) + repr(caught.value.failed_attempts)


def test_a_stream_that_is_left(url: str, abandoned: AbstractContextManager[None]) -> None:
    class Story(BaseModel):
        text: str = Field(min_length=1500)

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
            parts = made.create_partial(**asked(response_model=Story, max_tokens=1900))
            async for _ in parts:
                break
            await parts.aclose()

    with abandoned:
        asyncio.run(ask())
