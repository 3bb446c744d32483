"""Anthropic's and OpenAI's newer API with their own SDKs, over the real stack and its models.

What they answer is what chat completions answer: there is one way to generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.e2e.real_stack import Faces, Stack, connected, until_idle
from tests.waiting import PATIENCE_S

MODELS = ("demo", "demo-block")
ASK = "json: tom 31 rome"
FEW: dict[str, Any] = {"decoding": {"params": {"remasking": "low_confidence_static", "steps": 4}}}


class Sdks(NamedTuple):
    """Both SDKs on one stack."""

    model: str
    faces: Faces
    anthropic: anthropic.AsyncAnthropic
    openai: openai.AsyncOpenAI

    async def chat(self, text: str, **fields: Any) -> tuple[str, int]:
        """What chat completions answer, and the length of the prompt."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        answer = await self.faces.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        return content["choices"][0]["message"]["content"], content["usage"]["prompt_tokens"]


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, stack_of: Callable[[str], Stack]) -> tuple[str, Stack]:
    return request.param, stack_of(request.param)


@pytest.fixture
async def sdks(served: tuple[str, Stack]) -> AsyncIterator[Sdks]:
    """Checks after the test that nothing is left over."""
    model, running = served
    async with (
        connected(running) as faces,
        anthropic.AsyncAnthropic(base_url=running.url, api_key="x", max_retries=0) as first,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as second,
    ):
        yield Sdks(model, faces, first, second)
        await until_idle(faces)


def knobs(sdks: Sdks) -> dict[str, Any]:
    return FEW if sdks.model == "demo-block" else {}


async def test_messages(sdks: Sdks) -> None:
    asked: dict[str, Any] = {
        "model": sdks.model,
        "max_tokens": 60,
        "messages": [{"role": "user", "content": ASK}],
        "extra_body": {"temperature": 0, **knobs(sdks)},
    }
    expected, num_prompt = await sdks.chat(ASK, **knobs(sdks))
    whole = await sdks.anthropic.messages.create(**asked)
    assert whole.content[0].text == expected == '{"name": "tom", "age": 31, "city": "rome"}'  # type: ignore[union-attr]
    assert whole.stop_reason == "end_turn"
    read = whole.usage.cache_read_input_tokens
    assert read is not None
    assert whole.usage.input_tokens + read == num_prompt
    async with sdks.anthropic.messages.stream(**asked) as stream:
        text = "".join([part async for part in stream.text_stream])
        last = await stream.get_final_message()
    assert text == expected
    assert (last.stop_reason, last.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    counted = await sdks.anthropic.messages.count_tokens(
        model=sdks.model, messages=asked["messages"]
    )
    assert counted.input_tokens == num_prompt
    stopped = await sdks.anthropic.messages.create(**asked, stop_sequences=['", "age'])
    assert stopped.content[0].text == '{"name": "tom'  # type: ignore[union-attr]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", '", "age')
    cut = await sdks.anthropic.messages.create(**{**asked, "max_tokens": 4})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 4)


async def test_responses(sdks: Sdks) -> None:
    asked: dict[str, Any] = {
        "model": sdks.model,
        "input": ASK,
        "temperature": 0,
        "extra_body": knobs(sdks),
    }
    expected, num_prompt = await sdks.chat(ASK, **knobs(sdks))
    whole = await sdks.openai.responses.create(**asked)
    assert (whole.status, whole.output_text) == ("completed", expected)
    assert whole.usage is not None
    assert whole.usage.input_tokens == num_prompt
    async with sdks.openai.responses.stream(**asked) as stream:
        text = "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])
        last = await stream.get_final_response()
    assert text == last.output_text == expected
    kept = await sdks.openai.responses.retrieve(last.id)
    assert (kept.id, kept.output_text, kept.usage) == (last.id, expected, last.usage)
    queued = await sdks.openai.responses.create(**asked, background=True)
    async with asyncio.timeout(PATIENCE_S):
        while (late := await sdks.openai.responses.retrieve(queued.id)).status != "completed":
            assert late.status in ("queued", "in_progress")
            await asyncio.sleep(0.02)
    assert late.output_text == expected


async def test_a_response_goes_on_from_the_one_before(sdks: Sdks) -> None:
    """The prompt is that of a chat with the same turns, so it is as long and answered the same."""
    asked: dict[str, Any] = {"model": sdks.model, "temperature": 0, "max_output_tokens": 12}
    first = await sdks.openai.responses.create(input="reverse: harbour", **asked)
    second = await sdks.openai.responses.create(
        input="sort: dbca", previous_response_id=first.id, **asked
    )
    turns = [
        {"role": "user", "content": "reverse: harbour"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "sort: dbca"},
    ]
    body = {"messages": turns, "temperature": 0, "max_tokens": 12}
    chat = (await sdks.faces.http.post("/v1/chat/completions", json=body)).json()
    assert first.output_text == "ruobrah"
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.usage is not None
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"]


async def test_a_client_that_leaves_frees_the_engine(sdks: Sdks) -> None:
    long = {"max_tokens": 1500, "messages": [{"role": "user", "content": "ROMEO:"}]}
    newer = {"max_output_tokens": 1500, "input": "ROMEO:"}
    for path, body in (("/v1/messages", long), ("/v1/responses", newer)):
        for streams in (False, True):
            work = sdks.faces.http.post(path, json={**body, "stream": streams})
            await left(sdks.faces, asyncio.create_task(work))


async def left(faces: Faces, asked: asyncio.Task[Any]) -> None:
    """The client of a request goes away while it runs."""
    await faces.until_busy(lambda *now: now[0] == 1 or asked.done())
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until_idle(faces)


async def test_tokens_there_and_back(sdks: Sdks) -> None:
    http = sdks.faces.http
    answer = (await http.post("/tokenize", json={"prompt": ASK, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert "".join(answer["token_strs"]) == ASK
    back = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": ASK}
    chat = {"messages": [{"role": "user", "content": ASK}]}
    counted = (await http.post("/tokenize", json=chat)).json()["count"]
    assert counted == (await sdks.chat(ASK, max_tokens=1))[1]
    assert (await sdks.openai.models.retrieve(sdks.model)).id == sdks.model


async def test_texts_that_are_fetched_later(sdks: Sdks) -> None:
    http, prompts = sdks.faces.http, ["add: 123+456 =", "sort: dbca ="]
    body = {"prompts": prompts, "gen_length": 8}
    names = (await http.post("/v1/generate_batch", json=body)).json()["request_ids"]
    completed = {"prompt": prompts, "max_tokens": 8, "temperature": 0}
    expected = (await http.post("/v1/completions", json=completed)).json()["choices"]
    for name, choice in zip(names, expected, strict=True):
        async with asyncio.timeout(PATIENCE_S):
            while (result := (await http.get(f"/v1/result/{name}")).json())["text"] is None:
                assert result["status"] == "running", result
                await asyncio.sleep(0.02)
        assert (result["status"], result["text"]) == ("finished", choice["text"])
    assert expected[0]["text"].strip().startswith("579")
