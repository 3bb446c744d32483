"""The Anthropic face with its SDK against a real server; the engine is a fake that echoes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageParam

from tests.service.frontends import Stack, stack, until
from tidemill.runtime.errors import Overloaded
from tidemill.v1 import engine_pb2 as pb

HI: list[MessageParam] = [{"role": "user", "content": "hi é"}]
BODY = {"max_tokens": 6, "messages": HI}


@asynccontextmanager
async def sdk(served: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=served.url, api_key="any", max_retries=0
    ) as client:
        yield client


async def test_a_message(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        answer = await client.messages.create(
            model="fake", max_tokens=6, messages=HI, extra_headers={"x-request-id": "mine"}
        )
    assert (answer.id, answer.type, answer.role, answer.model) == (
        "msg_mine",
        "message",
        "assistant",
        "fake",
    )
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == "hi é"
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    # <|user|> h i space 2 bytes <|assistant|>; the fake says that it had two of them
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (5, 2)
    assert answer.usage.output_tokens == 6


async def test_every_parameter_reaches_the_engine(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "tidemill.frontend.request")
    async with stack(tmp_path) as served, sdk(served) as client:
        await client.messages.create(
            model="fake",
            max_tokens=4,
            messages=HI,
            stop_sequences=["zz"],
            metadata={"user_id": "tenant-7"},
            thinking={"type": "disabled"},
            tools=[],
            extra_body={
                "temperature": 0.25,
                "top_p": 0.5,
                "top_k": 7,
                "seed": -1,
                "decoding": {"params": {"steps": 3}},
                "nobody_knows": 1,
            },
        )
        (spec,) = served.engine.submits
    given = spec.sampling
    assert (given.temperature, given.top_p, given.top_k, given.max_tokens) == (0.25, 0.5, 7, 4)
    assert given.seed == 2**64 - 1
    assert dict(spec.decoding.params) == {"steps": 3}
    (record,) = (one for one in caplog.records if one.name == "tidemill.frontend.request")
    assert record.user == "tenant-7"


CONVERSATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "system text": ({"system": "be", "messages": HI}, "<|system|>be<|user|>hi é<|assistant|>"),
    "system blocks": (
        {"system": [{"type": "text", "text": "be"}, {"type": "text", "text": "c"}], "messages": HI},
        "<|system|>be\nc<|user|>hi é<|assistant|>",
    ),
    "blocks": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                        {"type": "text", "text": "b"},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
                {"role": "user", "content": "d"},
            ]
        },
        "<|user|>a\nb<|assistant|>c<|user|>d<|assistant|>",
    ),
    "turns of one role": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        "<|user|>a\nb<|assistant|>",
    ),
    "a beginning of the answer": (
        {"messages": [*HI, {"role": "assistant", "content": "ab"}]},
        "<|user|>hi é<|assistant|>ab",
    ),
}  # fmt: skip


async def test_conversations_are_rendered_and_counted(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        for name, (body, text) in CONVERSATIONS.items():
            await client.messages.create(model="fake", max_tokens=1, **body)
            counted = await client.messages.count_tokens(model="fake", **body)
            expected = served.tokenizer.encode(text).ids
            prompt = served.engine.submits[-1].prompt_token_ids
            assert list(memoryview(prompt).cast("I")) == expected, name
            assert counted.input_tokens == len(expected)


@pytest.mark.parametrize("per_step", [1, 3, 50])
async def test_a_stream_has_the_events_of_the_real_one(tmp_path: Path, per_step: int) -> None:
    async with (
        stack(tmp_path, engine={"tokens_per_step": per_step}) as served,
        served.http() as raw,
        sdk(served) as client,
    ):
        answer = await raw.post("/v1/messages", json={**BODY, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [block.split("\n") for block in answer.text.split("\n\n")]
        whole = await client.messages.create(model="fake", **BODY)
        async with client.messages.stream(model="fake", **BODY) as stream:
            collected = await stream.get_final_message()
    assert events.pop() == [""]
    names = [lines[0].removeprefix("event: ") for lines in events]
    contents = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert [content["type"] for content in contents] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    start = contents[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == 7
    Message.model_validate(start, strict=True)
    text = "".join(content["delta"]["text"] for content in contents[3:-3])
    assert text == "hi é"
    assert contents[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert contents[-2]["usage"]["output_tokens"] == 6
    without_id = {"id", "to_dict"}
    assert collected.model_dump(exclude=without_id) == whole.model_dump(exclude=without_id)


@pytest.mark.parametrize("streams", [False, True])
async def test_why_a_message_ended(tmp_path: Path, streams: bool) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:

        async def ask(content: str, **fields: Any) -> Message:
            messages: list[MessageParam] = [{"role": "user", "content": content}]
            wanted: dict[str, Any] = {"model": "fake", "max_tokens": 40, "messages": messages}
            if not streams:
                return await client.messages.create(**wanted, **fields)
            async with client.messages.stream(**wanted, **fields) as stream:
                return await stream.get_final_message()

        stopped = await ask("one é END two", stop_sequences=["no", "END"])
        ended = await ask("ab<|eos|>c")
        full = await ask("ab")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert stopped.content[0].text == "one é "  # type: ignore[union-attr]
    assert stopped.usage.output_tokens == len(b"<one \xc3\xa9 END")
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert ended.content[0].text == "ab"  # type: ignore[union-attr]
    assert (full.stop_reason, full.usage.output_tokens) == ("max_tokens", 40)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "5"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "no max_tokens": ({"max_tokens": None}, 400, "max_tokens"),
    "max_tokens 0": ({"max_tokens": 0}, 400, "max_tokens"),
    "no messages": ({"messages": []}, 400, "messages"),
    "a role": ({"messages": [{"role": "tool", "content": "a"}]}, 400, "messages[0].role"),
    "no content": ({"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages[0].content"),
    "a call": ({"messages": [{"role": "user", "content": [CALL]}]}, 400, "messages[0].content"),
    "an open call": (
        {"messages": [{"role": "assistant", "content": [CALL]}]},
        400,
        "messages[0] calls tools",
    ),
    "a result": ({"messages": [{"role": "user", "content": [RESULT]}]}, 400, "tool_use_id 't'"),
    "a result of strings": (
        {"messages": [
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [{**RESULT, "content": ["x"]}]},
        ]},
        400,
        "messages[1].content: a content part must be an object",
    ),
    "sealed thoughts alone": (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
        400,
        "messages have no content",
    ),
    "a call without a name": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
        400,
        "a block of type tool_use needs a string in `name`",
    ),
    "a system image": ({"system": [IMAGE]}, 400, "system"),
    "tools": ({"tools": [TOOL]}, 400, "the chat template of this model has no place for tools"),
    "a tool's name": ({"tools": [{**TOOL, "name": "a b"}]}, 400, "tools[0].name"),
    "a server's tool": ({"tools": [{**TOOL, "type": "web_search"}]}, 400, "tools[0]"),
    "no schema": ({"tools": [{"name": "f"}]}, 400, "tools[0].input_schema"),
    "any": ({"tools": [], "tool_choice": {"type": "any"}}, 400, "is of type any, and there are no"),
    "unnamed": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "tool_choice.name is mis"),
    "one": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, 400, "tool_choice"),
    "a budget": (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        400,
        "thinking.budget_tokens is 1024; it must be less than max_tokens",
    ),
    "a small budget": ({"thinking": {"type": "enabled", "budget_tokens": 1}}, 400, "budget_tokens"),
    "no budget": ({"thinking": {"type": "enabled"}}, 400, "thinking.budget_tokens goes with"),
    "display": ({"thinking": {"type": "adaptive", "display": "some"}}, 400, "thinking.display"),
    "an edit": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        400,
        "context_management.edits[0].type",
    ),
    "clearing": (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        400,
        "context_management.edits[0].keep",
    ),
    "effort": ({"output_config": {"effort": "low"}}, 400, "output_config.effort is 'low'"),
    "a format": ({"output_config": {"format": {"type": "xml"}}}, 400, "output_config.format.type"),
    "two formats": (
        {"output_config": {"format": {"type": "text"}}, "output_format": {"type": "text"}},
        400,
        "give one",
    ),
    "mcp_servers": ({"mcp_servers": [{"type": "url"}]}, 400, "mcp_servers"),
    "an OpenAI name": ({"max_completion_tokens": 3}, 400, "max_tokens"),
    "stop": ({"stop": ["a"]}, 400, "stop_sequences"),
    "logprobs": ({"logprobs": True}, 400, "logprobs"),
    "too many stops": ({"stop_sequences": ["x"] * 17}, 400, "stop_sequences"),
    "empty stop": ({"stop_sequences": [""]}, 400, "stop_sequences[0]"),
    "temperature": ({"temperature": -1.0}, 400, "temperature"),
    "a knob": ({"decoding": {"params": {"bogus": 1}}}, 400, "bogus"),
    "too long": ({"messages": [{"role": "user", "content": "a" * 600}]}, 400, "too long: 60"),
    "too much": ({"max_tokens": 600}, 400, "`max_tokens` exceed context limit: "),
    "model": ({"model": "claude-9"}, 404, "'claude-9' does not exist"),
}  # fmt: skip


async def test_wrong_requests(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        for name, (fields, status, words) in WRONG.items():
            body = {key: value for key, value in {**BODY, **fields}.items() if value is not None}
            for stream in (False, True):
                answer = await client.post("/v1/messages", json={**body, "stream": stream})
                assert answer.status_code == status, (name, answer.text)
                content = answer.json()
                assert (content["type"], set(content)) == ("error", {"type", "error"})
                kind = "invalid_request_error" if status == 400 else "not_found_error"
                assert content["error"]["type"] == kind
                assert words in content["error"]["message"], (name, content)
        assert served.engine.live == 0


async def test_errors_are_the_classes_of_the_sdk(tmp_path: Path) -> None:
    async with stack(tmp_path, max_body_bytes=1 << 16) as served, sdk(served) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="claude-9", max_tokens=1, messages=HI)
        with pytest.raises(anthropic.BadRequestError, match="no place for tools"):
            await client.messages.count_tokens(
                model="fake", messages=HI, tools=[{"name": "f", "input_schema": {"type": "object"}}]
            )
        with pytest.raises(anthropic.RequestTooLargeError, match="larger than 65536 bytes"):
            await client.messages.create(
                model="fake", max_tokens=1, messages=[{"role": "user", "content": "a" * (1 << 17)}]
            )
        with pytest.raises(anthropic.NotFoundError, match="there is no route"):
            await client.messages.batches.list()
        served.engine.refuse = Overloaded("1024 requests are waiting", retry_after_ms=1500)
        with pytest.raises(anthropic.RateLimitError, match="1024 requests") as caught:
            await client.messages.create(model="fake", max_tokens=1, messages=HI)
        assert caught.value.response.headers["retry-after"] == "2"


async def test_a_stream_that_fails_ends_in_an_error_event(tmp_path: Path) -> None:
    engine = {"step_s": 0.01, "max_model_len": 1 << 16}
    async with stack(tmp_path, engine=engine) as served, sdk(served) as client:
        body: dict[str, Any] = {"messages": HI, "max_tokens": 60_000, "stream": True}
        stream = await client.messages.create(model="fake", **body)
        assert (await anext(stream)).type == "message_start"
        served.engine.drop_sessions()
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            async for _ in stream:
                pass
        await until(lambda: served.frontend.desk.state == "ready")
        async with (
            served.http() as raw,
            raw.stream("POST", "/v1/messages", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: message_start"
            served.engine.drop_sessions()
            rest = [line async for line in lines if line]
    assert rest[-2] == "event: error"
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_that_the_engine_ends_is_an_error(tmp_path: Path, streams: bool) -> None:
    """The API has no stop reason for it, and half an answer must not look like a whole one."""
    async with stack(tmp_path, engine={"hold": True}) as served, sdk(served) as client:
        create = client.messages.create(model="fake", stream=streams, **BODY)
        asked = asyncio.create_task(create)
        await until(lambda: served.engine.live == 1)
        finish = pb.Finish(reason=pb.FinishReason.FINISH_REASON_ABORTED)
        step = pb.Step(step_seq=1, handles=[1], counts=[0])
        step.finished.add(row=0, finish=finish)
        await served.engine.say(pb.SessionResponse(step=step))
        with pytest.raises(anthropic.InternalServerError, match="ended this request") as caught:
            await asked
        assert caught.value.status_code == 503


@pytest.mark.parametrize("phase", ["before the first token", "while streaming", "not streaming"])
async def test_a_client_that_leaves_stops_the_engine(tmp_path: Path, phase: str) -> None:
    held = phase == "before the first token"
    engine = {"hold": held, "step_s": 0.01, "max_model_len": 1 << 16}
    async with stack(tmp_path, engine=engine) as served:
        async with served.http() as client:
            body = {**BODY, "max_tokens": 60_000, "stream": phase != "not streaming"}
            if phase == "while streaming":
                async with client.stream("POST", "/v1/messages", json=body) as answer:
                    await anext(answer.aiter_lines())
            else:
                asked = asyncio.create_task(client.post("/v1/messages", json=body))
                await until(lambda: served.engine.live == 1)
                asked.cancel()
            await until(lambda: served.engine.live == 0)
        assert served.engine.outcomes == ["aborted"]
        await until(lambda: served.frontend.desk.num_live == 0)
