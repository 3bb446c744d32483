"""Structured outputs of a model that reasons first. The built-in model does not, so the one server
believes that its output begins with reasoning, the other that it may."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

import tidemill
from frontend.engine_convert import pack_ids, unpack_ids
from frontend.tokenizer import TextTokenizer
from tests.e2e.real_stack import HOST, Stack
from tests.service.frontends import frontend_for
from tests.waiting import PATIENCE_S, http_client
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as pb_grpc

BUILTIN = Path(tidemill.__file__).parent / "builtin"

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
BODY = {
    "messages": [{"role": "user", "content": "json: tom 31 rome"}],
    "max_tokens": 60,
    "temperature": 0,
    "response_format": FORMAT,
}


async def ask(stack: Stack, parser: str, **fields: Any) -> dict[str, Any]:
    async with frontend_for(stack.port, reasoning_parser=parser) as frontend:
        assert await frontend.desk.fleet.wait_ready(PATIENCE_S)
        async with http_client(f"http://{HOST}:{frontend.http_port}") as http:
            answer = await http.post("/v1/chat/completions", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("parser", ["none", "qwen3"])
async def test_a_model_that_does_not_reason_answers_at_once(stack: Stack, parser: str) -> None:
    answer = await ask(stack, parser)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["name"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_the_grammar_waits_for_the_end_of_the_reasoning(stack: Stack) -> None:
    """The model never ends what it does not know of: all is reasoning, and none of it JSON."""
    answer = await ask(stack, "deepseek_r1")
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert choice["message"]["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60


TOKENIZER = TextTokenizer(BUILTIN / "demo")


async def generated(stack: Stack, **fields: Any) -> list[int]:
    """Tokens that the engine itself gives, greedily."""
    spec = pb.GenerateSpec(
        prompt_token_ids=pack_ids(
            TOKENIZER.encode("json: tom 31 rome =", add_special_tokens=False)
        ),
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=24),
        **fields,
    )
    tokens: list[int] = []
    async with grpc.aio.insecure_channel(f"{HOST}:{stack.port}") as channel:
        engine = pb_grpc.EngineServiceStub(channel)
        async for news in engine.Generate(pb.GenerateRequest(spec=spec), timeout=PATIENCE_S):
            tokens += unpack_ids(news.token_ids)
    return tokens


async def test_behind_the_reasoning_the_answer_follows_the_grammar(stack: Stack) -> None:
    """The tag is a letter that the model does write: up to it nothing changes."""
    free = TOKENIZER.decode(await generated(stack), skip_special_tokens=True)
    end = free[4]
    before = free[: free.index(end) + 1]
    bound = await generated(
        stack, constraint=pb.Constraint(regex="[0-9]{5}"), reasoning=pb.Reasoning(end=end)
    )
    text = TOKENIZER.decode(bound, skip_special_tokens=True)
    assert re.fullmatch(re.escape(before) + r"\s{0,8}[0-9]{5}", text), text
    assert not re.search(r"[0-9]{5}", free), "the model would write such a thing anyway"
