"""Bodies as Claude Code and Codex send them: what counts of them reaches template and engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.frontends import Stack, stack

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAID = "<think>hm</think>ok<|eos|>"
KEEPING: dict[str, Any] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
MESSAGE: dict[str, Any] = {"max_tokens": 60, "messages": [{"role": "user", "content": SAID}]}
WHOLE: dict[str, Any] = {**MESSAGE, "max_tokens": 400}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Stack, httpx.AsyncClient]]:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    engine = {"max_model_len": 4096}
    async with (
        stack(folder, engine=engine, chat_template=str(template), **flags) as served,
        served.http() as client,
    ):
        yield served, client


def prompt_of(served: Stack) -> str:
    ids = memoryview(served.engine.submits[-1].prompt_token_ids).cast("I").tolist()
    return str(served.tokenizer.decode(ids, skip_special_tokens=False))


async def test_a_budget_of_thinking_is_a_target(tmp_path: Path) -> None:
    async with serving(tmp_path) as (served, client):
        for display, kinds in ((None, ["thinking", "text"]), ("omitted", ["text"])):
            thinking = {**THINKING, "display": display}
            body = {**WHOLE, "max_tokens": 1100, "thinking": thinking}
            answer = (await client.post("/v1/messages", json=body)).json()
            assert [block["type"] for block in answer["content"]] == kinds
            assert prompt_of(served).endswith("True<|assistant|>")


async def test_context_management_that_clears_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        body = {**MESSAGE, "context_management": KEEPING}
        whole = (await client.post("/v1/messages", json=body)).json()
        assert whole["context_management"] == {"applied_edits": []}
        events = (await client.post("/v1/messages", json={**body, "stream": True})).text
        (last,) = [
            line for line in events.splitlines() if '"message_delta"' in line and "data" in line
        ]
        assert json.loads(last[6:])["context_management"] == {"applied_edits": []}
        asked = {"messages": MESSAGE["messages"]}
        path = "/v1/messages/count_tokens"
        plain = (await client.post(path, json=asked)).json()
        counted = (await client.post(path, json={**asked, "context_management": KEEPING})).json()
        assert counted["context_management"] == {"original_input_tokens": plain["input_tokens"]}
        assert "context_management" not in {
            **plain,
            **(await client.post("/v1/messages", json=MESSAGE)).json(),
        }


async def test_what_an_answer_must_be_reaches_the_engine(tmp_path: Path) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    async with serving(tmp_path) as (served, client):
        for fields in ({"output_config": {"format": form}}, {"output_format": form}):
            answer = await client.post("/v1/messages", json={**MESSAGE, **fields})
            assert answer.status_code == 200, answer.text
            assert json.loads(served.engine.submits[-1].constraint.json_schema) == SCHEMA
        body = {**MESSAGE, "output_config": {"effort": "low"}}
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        assert prompt_of(served).endswith("low<|assistant|>")


async def test_sealed_thoughts_are_left_out(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
            {"type": "redacted_thinking", "data": "c2VhbGVk"},
            {"type": "text", "text": "b"},
        ]},
        {"role": "user", "content": "c"},
    ]  # fmt: skip
    async with serving(tmp_path) as (served, client):
        await client.post("/v1/messages", json={**MESSAGE, "messages": turns})
        assert prompt_of(served) == "<|user|>a<|assistant|>(hm)b<|user|>c<|assistant|>"
        turns[0] = {"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}
        wrong = await client.post("/v1/messages", json={**MESSAGE, "messages": turns})
        assert "redacted_thinking" in wrong.json()["error"]["message"]


async def test_the_id_under_anthropics_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        for body in (MESSAGE, {**MESSAGE, "stream": True}, {}):
            answer = await client.post("/v1/messages", json=body)
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
        other = await client.post("/v1/chat/completions", json=MESSAGE)
        assert "request-id" not in other.headers


async def test_a_body_of_codex(tmp_path: Path) -> None:
    function = {"type": "function", "name": "shell", "parameters": SCHEMA, "strict": False}
    text = [{"type": "input_text", "text": "a"}]
    thought = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    call = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c"}
    result = {"type": "function_call_output", "call_id": "c", "output": "done"}
    body = {
        "model": "fake",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": text},
            {"type": "message", "role": "user", "content": text},
            thought,
            call,
            result,
        ],
        "tools": [function],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "max_output_tokens": 5,
    }
    async with serving(tmp_path) as (served, client):
        events = (await client.post("/v1/responses", json=body)).text
        assert "event: response.incomplete" in events
        assert '"reasoning":{"effort":"medium","summary":null}' in events
        assert prompt_of(served) == (
            "<|system|>You are an agent.<|system|>a<|user|>a<|assistant|>[shell]<|tool|>done"
            "shell medium<|assistant|>"
        )


FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FUNCTION = {"name": "f", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "/v1/chat/completions",
            {"messages": MESSAGE["messages"], "response_format": FORMAT,
             "tools": [{"type": "function", "function": FUNCTION}]},
            {"type": "function", "function": {"name": "f"}},
        ),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {**FORMAT["json_schema"], "type": "json_schema"}},
             "tools": [{"type": "function", **FUNCTION}]},
            {"type": "function", "name": "f"},
        ),
        (
            "/v1/messages",
            {**MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
             "tools": [{"name": "f", "input_schema": SCHEMA}]},
            {"type": "tool", "name": "f"},
        ),
    ],
)  # fmt: skip
async def test_a_forced_call_leaves_no_text_to_format(
    tmp_path: Path, path: str, fields: Any, named: Any
) -> None:
    async with serving(tmp_path) as (served, client):
        await client.post(path, json={**fields, "tool_choice": named})
        assert "%json" in served.engine.submits[-1].constraint.ebnf
        if path == "/v1/chat/completions":
            wrong = {**fields, "tool_choice": named, "response_format": None, "guided_regex": "a"}
            answer = await client.post(path, json=wrong)
            assert answer.json()["error"]["param"] == "tool_choice"
