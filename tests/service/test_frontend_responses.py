"""/v1/responses with the official SDK against a real server; the engine is a fake that echoes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.service.frontends import Stack, frontend_for, stack, until
from tests.waiting import PATIENCE_S, http_client
from tidemill.runtime.errors import Overloaded

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = "message.output_text.logprobs"
BODY = {"input": "hi é", "max_output_tokens": 6}
PART: dict[str, Any] = {"type": "input_text", "text": "a"}
ASKED: dict[str, Any] = {"model": "fake", **BODY}


@asynccontextmanager
async def sdk(served: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="any", max_retries=0
    ) as client:
        yield client


async def settled(client: openai.AsyncOpenAI, name: str) -> Response:
    """A response in the background, as soon as it is not being made any more."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            response = await client.responses.retrieve(name)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.01)


async def test_a_response(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        answer = await client.responses.create(
            model="fake", input="hi é", max_output_tokens=6, metadata={"a": "b"}, temperature=0.5
        )
        raw = (await client.responses.with_raw_response.retrieve(answer.id)).text
    Response.model_validate_json(raw)
    assert re.fullmatch(r"resp_[0-9a-f]{40}", answer.id)
    assert answer.output_text == "hi é"
    assert (answer.status, answer.object, answer.model) == ("incomplete", "response", "fake")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.metadata, answer.temperature, answer.tools) == ({"a": "b"}, 0.5, [])
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 6)
    assert (answer.usage.total_tokens, answer.usage.input_tokens_details.cached_tokens) == (13, 2)
    assert json.loads(raw) == answer.to_dict(mode="json")


async def test_every_parameter_reaches_the_engine(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "tidemill.frontend.request")
    async with stack(tmp_path) as served, sdk(served) as client:
        await client.responses.create(
            model="fake",
            input=[
                {"role": "developer", "content": "d"},
                {"role": "user", "type": "message", "content": [PART]},
            ],
            instructions="be",
            max_output_tokens=4,
            temperature=0.25,
            top_p=0.5,
            user="tenant-6",
            safety_identifier="tenant-7",
            tools=[],
            tool_choice="auto",
            text={"format": {"type": "text"}},
            truncation="disabled",
            include=["reasoning.encrypted_content"],
            parallel_tool_calls=True,
            prompt_cache_key="k",
            extra_body={"seed": -1, "decoding": {"params": {"steps": 3}}, "nobody_knows": 1},
        )
        (spec,) = served.engine.submits
        expected = served.tokenizer.encode("<|system|>be<|system|>d<|user|>a<|assistant|>").ids
    assert list(memoryview(spec.prompt_token_ids).cast("I")) == expected
    given = spec.sampling
    assert (given.temperature, given.top_p, given.max_tokens) == (0.25, 0.5, 4)
    assert given.seed == 2**64 - 1
    assert not spec.logprobs.HasField("top")
    assert dict(spec.decoding.params) == {"steps": 3}
    (record,) = (one for one in caplog.records if one.name == "tidemill.frontend.request")
    assert record.user == "tenant-7"


async def test_logprobs(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model": "fake", **BODY, "include": [LOGPROBS], "top_logprobs": 2}
    async with stack(tmp_path) as served, sdk(served) as client:
        whole = await client.responses.create(**fields)
        events = [event async for event in await client.responses.create(**fields, stream=True)]
    entries = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert [entry.token for entry in entries][1:4] == ["h", "i", " "]
    assert entries[1].logprob == pytest.approx(-1.04)
    assert [top.token for top in entries[1].top_logprobs] == ["h", "g"]
    streamed = [
        one for event in events if event.type.endswith("text.delta") for one in event.logprobs
    ]
    assert [one.logprob for one in streamed] == [one.logprob for one in entries]


@pytest.mark.parametrize("per_step", [1, 3, 50])
@pytest.mark.parametrize("prompt", ["hi é", "ab<|eos|>"])
async def test_a_stream_has_the_events_of_the_real_one(
    tmp_path: Path, per_step: int, prompt: str
) -> None:
    body = {**BODY, "input": prompt}
    async with (
        stack(tmp_path, engine={"tokens_per_step": per_step}) as served,
        served.http() as raw,
        sdk(served) as client,
    ):
        answer = await raw.post("/v1/responses", json={**body, "stream": True})
        blocks = [block.split("\n") for block in answer.text.split("\n\n")]
        whole = (await raw.post("/v1/responses", json=body)).json()
        asked: dict[str, Any] = {"model": "fake", **body}
        typed = [event async for event in await client.responses.create(**asked, stream=True)]
        kept = await client.responses.retrieve(typed[-1].response.id)
        if prompt != "hi é":  # the SDK's collector knows complete responses only
            async with client.responses.stream(**asked) as stream:
                assert (await stream.get_final_response()).output_text == "ab"
    assert blocks.pop() == [""]
    events = [json.loads(lines[1].removeprefix("data: ")) for lines in blocks]
    kinds = [event["type"] for event in events]
    assert [lines[0] for lines in blocks] == [f"event: {kind}" for kind in kinds]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = "incomplete" if prompt == "hi é" else "completed"
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{last}",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    for event in events:
        EVENT.validate_python(event)
    text = "".join(event["delta"] for event in events[4:-4])
    assert text == events[-4]["text"] == prompt.removesuffix("<|eos|>")
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    assert events[2]["item"]["content"] == []
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    changing = {"id": None, "output": None, "completed_at": None, "created_at": None}
    assert final | changing == whole | changing
    assert final["output"][0]["content"] == whole["output"][0]["content"]
    assert typed[-1].response == kept
    assert kept.output_text == text


async def test_a_conversation_goes_on_from_what_is_kept(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        first = await client.responses.create(model="fake", input="ab<|eos|>", instructions="one")
        second = await client.responses.create(
            model="fake",
            input=[{"role": "user", "content": "cd"}],
            instructions="two",
            previous_response_id=first.id,
            max_output_tokens=3,
        )
        third = await client.responses.create(
            model="fake", input="ef", previous_response_id=second.id, max_output_tokens=1
        )
        prompts = [list(memoryview(s.prompt_token_ids).cast("I")) for s in served.engine.submits]
        texts = [served.tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
        with_items = await client.responses.create(
            model="fake",
            input=[{"role": "user", "content": "ab"}, *second.output],  # type: ignore[list-item]
            max_output_tokens=1,
        )
        assert with_items.status == "incomplete"
    assert texts == [
        "<|system|>one<|user|>ab<|eos|><|assistant|>",
        f"<|system|>two<|user|>ab<|eos|><|assistant|>{first.output_text}<|user|>cd<|assistant|>",
        f"<|user|>ab<|eos|><|assistant|>{first.output_text}<|user|>cd<|assistant|>"
        f"{second.output_text}<|user|>ef<|assistant|>",
    ]
    assert third.previous_response_id == second.id


async def test_what_is_not_stored_or_was_deleted_is_gone(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        unkept = await client.responses.create(store=False, **ASKED)
        kept = await client.responses.create(**ASKED)
        await client.responses.delete(kept.id)
        for name in (unkept.id, kept.id, "resp_1"):
            for call in (client.responses.retrieve, client.responses.cancel):
                with pytest.raises(openai.NotFoundError, match="never kept, deleted, or dropped"):
                    await call(name)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(name)
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.create(model="fake", input="a", previous_response_id=name)
            assert caught.value.param == "previous_response_id"


async def test_the_id_names_the_frontend_that_keeps_it(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        engine = served.frontend.desk.config.engine
        answer = await client.responses.create(**ASKED)
        async with frontend_for(int(engine.rpartition(":")[2])) as other:
            await until(lambda: other.desk.state == "ready")
            url = f"http://127.0.0.1:{other.http_port}"
            async with http_client(url) as raw:
                missing = await raw.get(f"/v1/responses/{answer.id}")
                names = [served.frontend.desk.replica, other.desk.replica]
                assert (await raw.get("/health")).json()["replica"] == names[1]
    assert missing.status_code == 404
    error = missing.json()["error"]
    assert error["code"] == "held_by_another_frontend"
    assert f"held by the frontend {names[0]} and this is {names[1]}" in error["message"]


async def test_in_the_background(tmp_path: Path) -> None:
    async with stack(tmp_path, engine={"hold": True}) as served, sdk(served) as client:
        queued = await client.responses.create(background=True, **ASKED)
        assert (queued.status, queued.output, queued.background) == ("queued", [], True)
        await until(lambda: served.engine.live == 1)
        running = await client.responses.retrieve(queued.id)
        assert (running.status, running.output) == ("in_progress", [])
        with pytest.raises(openai.BadRequestError, match="is in_progress"):
            await client.responses.create(model="fake", input="a", previous_response_id=queued.id)
        served.engine.hold = False
        answer = await settled(client, queued.id)
        assert (answer.status, answer.output_text) == ("incomplete", "hi é")
        assert (await client.responses.cancel(queued.id)).status == "incomplete"
        served.engine.refuse = Overloaded("1024 requests are waiting")
        late = await client.responses.create(background=True, **ASKED)
        failed = await settled(client, late.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == (
            "rate_limit_exceeded",
            "1024 requests are waiting",
        )


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_a_response_in_the_background_can_be_ended(tmp_path: Path, verb: str) -> None:
    async with stack(tmp_path, engine={"hold": True}) as served, sdk(served) as client:
        queued = await client.responses.create(background=True, **ASKED)
        await until(lambda: served.engine.live == 1)
        if verb == "cancel":
            assert (await client.responses.cancel(queued.id)).status == "cancelled"
            assert (await client.responses.cancel(queued.id)).status == "cancelled"
        else:
            await client.responses.delete(queued.id)
        await until(lambda: served.engine.outcomes == ["aborted"])
        if verb == "cancel":
            assert (await client.responses.retrieve(queued.id)).status == "cancelled"
        else:
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(queued.id)


async def test_a_frontend_that_stops_ends_what_runs_in_the_background(tmp_path: Path) -> None:
    async with stack(tmp_path, engine={"hold": True}) as served:
        async with sdk(served) as client:
            await client.responses.create(background=True, **ASKED)
            await until(lambda: served.engine.live == 1)
        await served.frontend.desk.close()
        assert served.frontend.desk.num_live == 0


DEEP = "[" * 200 + "]" * 200
WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "no input": ({"input": None}, 400, "input"),
    "no items": ({"input": []}, 400, "input"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        400,
        "input[0].content",
    ),
    "a search": ({"input": [{"type": "web_search_call"}]}, 400, "input[0]"),
    "a call": ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input[0].call_id"),
    "deep arguments": (
        {"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": DEEP}]},
        400,
        "input[0].arguments",
    ),
    "an output": (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "5"}]},
        400,
        "input[0].call_id",
    ),
    "no role": ({"input": [{"content": "a"}]}, 400, "input[0].role"),
    "no content": ({"input": [{"role": "user"}]}, 400, "input[0].content"),
    "tools": ({"tools": [{"type": "function", "name": "f"}]}, 400, "tools"),
    "a tool's name": ({"tools": [{"type": "function", "name": "a b"}]}, 400, "tools[0].name"),
    "no name": ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
    "search": ({"tools": [{"type": "web_search"}]}, 400, "tools[0]"),
    "tool_choice": ({"tool_choice": "required"}, 400, "tool_choice"),
    "text": ({"text": {"format": {"type": "yaml"}}}, 400, "text.format"),
    "verbosity": ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
    "reasoning": ({"reasoning": {"effort": "low"}}, 400, "reasoning.effort"),
    "truncation": ({"truncation": "auto"}, 400, "truncation"),
    "conversation": ({"conversation": "c"}, 400, "conversation"),
    "prompt": ({"prompt": {"id": "p"}}, 400, "prompt"),
    "a chat's name": ({"max_tokens": 3}, 400, "max_tokens"),
    "another chat's name": ({"n": 2}, 400, "n"),
    "max_output_tokens": ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    "temperature": ({"temperature": -1.0}, 400, "temperature"),
    "a knob": ({"decoding": {"params": {"bogus": 1}}}, 400, "decoding.params.bogus"),
    "too long": ({"input": "a" * 600}, 400, "input"),
    "include": ({"include": ["everything"]}, 400, "include[0]"),
    "top_logprobs": ({"top_logprobs": 1}, 400, "top_logprobs"),
    "many": ({"include": [LOGPROBS], "top_logprobs": 6}, 400, "top_logprobs"),
    "metadata": ({"metadata": {"a" * 65: "b"}}, 400, "metadata"),
    "unstored": ({"background": True, "store": False}, 400, "background"),
    "model": ({"model": "gpt-9"}, 404, "model"),
}  # fmt: skip


async def test_wrong_requests(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        for name, (fields, status, param) in WRONG.items():
            body = {key: value for key, value in {**BODY, **fields}.items() if value is not None}
            for stream in (False, True):
                answer = await client.post("/v1/responses", json={**body, "stream": stream})
                assert answer.status_code == status, (name, answer.text)
                error = answer.json()["error"]
                assert error["param"].split(".aa")[0] == param, (name, error)
        assert served.engine.live == 0
        assert served.frontend.desk.num_live == 0


async def test_what_cannot_be_streamed_says_so(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        kept = await client.responses.create(**ASKED)
        with pytest.raises(openai.BadRequestError, match=r"of the response .+ are not kept"):
            await client.responses.retrieve(kept.id, stream=True)
        with pytest.raises(openai.BadRequestError, match="not made in the background"):
            await client.responses.cancel(kept.id)


async def test_a_stream_that_fails_ends_in_response_failed(tmp_path: Path) -> None:
    engine = {"step_s": 0.01, "max_model_len": 1 << 16}
    async with (
        stack(tmp_path, engine=engine) as served,
        served.http() as raw,
    ):
        body = {**BODY, "max_output_tokens": 60_000, "stream": True}
        async with raw.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("event: response.output_text.delta"):
                pass
            served.engine.drop_sessions()
            rest = [line async for line in lines if line]
        failed = json.loads(rest[-1].removeprefix("data: "))
        response = failed["response"]
        kept = await raw.get(f"/v1/responses/{response['id']}")
    assert rest[-2] == "event: response.failed"
    EVENT.validate_python(failed)
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert "engine" in response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete"
    assert kept.json() == response


@pytest.mark.parametrize("phase", ["before the first token", "while streaming", "not streaming"])
async def test_a_client_that_leaves_stops_the_engine(tmp_path: Path, phase: str) -> None:
    held = phase == "before the first token"
    engine = {"hold": held, "step_s": 0.01, "max_model_len": 1 << 16}
    async with stack(tmp_path, engine=engine) as served:
        async with served.http() as client:
            body = {**BODY, "max_output_tokens": 60_000, "stream": phase != "not streaming"}
            if phase == "while streaming":
                async with client.stream("POST", "/v1/responses", json=body) as answer:
                    await anext(answer.aiter_lines())
            else:
                asked = asyncio.create_task(client.post("/v1/responses", json=body))
                await until(lambda: served.engine.live == 1)
                asked.cancel()
            await until(lambda: served.engine.live == 0)
        assert served.engine.outcomes == ["aborted"]
        await until(lambda: served.frontend.desk.num_live == 0)
