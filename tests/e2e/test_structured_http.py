"""Structured outputs over HTTP and gRPC, with the clients that users have, on the real stack."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.real_stack import HOST, Faces, Stack
from tidemill.client import AsyncClient
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import SamplingParams, StructuredOutputsParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": "json: tom 31 rome"}]
WRONG: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}


def valid(text: str | None) -> Any:
    found = json.loads(text or "")
    jsonschema.validate(found, SCHEMA)
    return found


async def test_openai_sdk(faces: Faces, stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as sdk:
        asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 100, "temperature": 0}
        whole = await sdk.chat.completions.create(
            **asked, response_format=FORMAT, n=2, logprobs=True, top_logprobs=2
        )
        for choice in whole.choices:
            assert valid(choice.message.content)["name"] == "tom"
            assert choice.finish_reason == "stop"
            assert choice.logprobs is not None
            spelled = "".join(one.token for one in choice.logprobs.content or [])
            assert spelled == choice.message.content
        text = ""
        async for chunk in await sdk.chat.completions.create(
            **asked, response_format=FORMAT, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content
        for name, value in (
            ("structured_outputs", {"json": SCHEMA}),
            ("guided_json", SCHEMA),
            ("json_schema", json.dumps(SCHEMA)),
        ):
            same = await sdk.chat.completions.create(**asked, extra_body={name: value})
            assert same.choices[0].message.content == text
        response = await sdk.responses.create(
            model="demo",
            input=MESSAGES,
            max_output_tokens=100,
            temperature=0,
            text={"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
        )
        assert response.output_text == text
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == "json_schema"
        for wrong, param in ((WRONG, "response_format"), ({"type": "yaml"}, "response_format")):
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.chat.completions.create(**asked, response_format=wrong)
            assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["rome", "tom"]}, {"rome", "tom"}),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, {f"{n:03}" for n in range(1000)}),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"allowed_token_ids": [97, 98], "max_tokens": 2}, None),
    ],
)
async def test_completions(faces: Faces, fields: dict[str, Any], texts: set[str] | None) -> None:
    body = {"prompt": "json: tom 31 rome", "max_tokens": 20, "temperature": 1.0, "n": 3, **fields}
    answer = await faces.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        if texts is not None:
            assert choice["text"] in texts
        else:
            assert len(set(choice["text"])) <= 2


async def test_grpc_client(faces: Faces, stack: Stack) -> None:
    structured = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=structured)
    async with AsyncClient(f"{HOST}:{stack.grpc_port}") as client:
        answer = await client.chat(MESSAGES[0]["content"], params)
        assert valid(answer.text)
        streamed = [d.text async for d in client.chat_stream(MESSAGES[0]["content"], params)]
        assert "".join(streamed) == answer.text
        free = await client.generate("json: tom 31 rome", SamplingParams(temperature=0.0))
        word = free.text[2:5]
        bound = SamplingParams(temperature=0.0, bad_words=[word])
        assert word not in (await client.generate("json: tom 31 rome", bound)).text
        wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(["))
        with pytest.raises(InvalidRequest, match="does not compile") as caught:
            await client.generate("a", wrong)
        assert caught.value.param == "constraint.regex"


async def test_beside_tools_the_model_calls_or_answers(faces: Faces, stack: Stack) -> None:
    """Which of them, its first token says, and the bias decides that."""
    unit = {"type": "object", "properties": {"unit": {"enum": ["km"]}}, "required": ["unit"]}
    function = {"name": "measure", "parameters": {**unit, "additionalProperties": False}}
    tool: Any = {"type": "function", "function": {**function, "strict": True}}
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as sdk:
        for bias, has_called in ((-100, True), (100, False)):
            answer = await sdk.chat.completions.create(
                model="demo",
                messages=MESSAGES,
                max_tokens=150,
                temperature=0,
                tools=[tool],
                response_format=FORMAT,
                parallel_tool_calls=False,
                logit_bias={str(ord("{")): bias},
            )
            (choice,) = answer.choices
            if has_called:
                (call,) = choice.message.tool_calls or []
                assert call.type == "function"
                assert (call.function.name, choice.message.content) == ("measure", None)
                assert json.loads(call.function.arguments) == {"unit": "km"}
            else:
                assert not choice.message.tool_calls
                assert valid(choice.message.content)
