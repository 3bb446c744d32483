"""What is kept of a response: the items that it answers, and its events if it was so made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from frontend.api import responses_making
from frontend.api.responses_log import EventLog
from frontend.request import Chat
from frontend.roles import as_known
from tests.service.frontends import Stack, stack, until
from tests.waiting import PATIENCE_S

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
ASKED: dict[str, Any] = {"model": "fake", "input": "abcdef", "max_output_tokens": 40}
LOGGED: dict[str, Any] = {**ASKED, "background": True, "stream": True}


@asynccontextmanager
async def sdk(served: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


async def items(raw: httpx.AsyncClient, name: str, **query: Any) -> Any:
    answer = await raw.get(f"/v1/responses/{name}/input_items", params=query)
    return answer.json() if answer.status_code == 200 else answer.json()["error"]["param"]


async def test_input_items(tmp_path: Path) -> None:
    said: list[Any] = [
        {"role": "developer", "content": "b"},
        {"id": "msg_mine", "type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "user", "content": "e"},
    ]  # fmt: skip
    async with stack(tmp_path) as served, sdk(served) as client, served.http() as raw:
        first = await client.responses.create(model="fake", input="a", max_output_tokens=2)
        second = await client.responses.create(
            model="fake", input=said, previous_response_id=first.id, max_output_tokens=1
        )
        every = (await items(raw, second.id, order="asc"))["data"]
        for item in every:
            ITEM.validate_python(item)
        texts = [item["content"][0]["text"] for item in every]
        assert texts == ["a", first.output_text, "b", "c", "d", "hm", "e"]
        names = [item["id"] for item in every]
        assert len(set(names)) == 7
        assert names[1] == first.output[0].id
        assert names[3] == "msg_mine"
        assert await items(raw, second.id) == {
            "object": "list", "data": every[::-1], "first_id": names[-1], "last_id": names[0],
            "has_more": False,
        }  # fmt: skip
        part = await items(raw, second.id, order="asc", limit=2, after=names[1])
        assert (part["data"], part["has_more"]) == (every[2:4], True)
        assert (await items(raw, second.id, after=names[0]))["data"] == []
        for query, param in (
            ({"limit": 0}, "limit"),
            ({"limit": 101}, "limit"),
            ({"limit": "9" * 5000}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "msg_none"}, "after"),
        ):
            assert await items(raw, second.id, **query) == param
        assert await items(raw, "resp_none") == "id"


async def test_a_refusal_of_an_earlier_answer_stays_one(tmp_path: Path) -> None:
    said: list[Any] = [
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "why"},
    ]  # fmt: skip
    async with stack(tmp_path) as served, sdk(served) as client, served.http() as raw:
        made = await client.responses.create(model="fake", input=said, max_output_tokens=1)
        (told, _) = (await items(raw, made.id, order="asc"))["data"]
    assert told == ITEM.validate_python(told).model_dump(exclude_none=True) == said[0]


async def read(raw: httpx.AsyncClient, name: str, **query: Any) -> list[Any]:
    answer = await raw.get(f"/v1/responses/{name}", params={"stream": "true", **query})
    assert answer.status_code == 200, answer.text
    return [json.loads(part.partition("data: ")[2]) for part in answer.text.split("\n\n")[:-1]]


async def test_events_are_read_from_anywhere_and_by_anybody(tmp_path: Path) -> None:
    """Also by a client that comes while they are made, and by the one that asked for them."""
    async with stack(tmp_path) as served, sdk(served) as client, served.http() as raw:
        served.engine.hold_after = 10
        stream = await client.responses.create(**LOGGED)
        first = await anext(stream)
        name = first.response.id
        early = asyncio.create_task(read(raw, name))
        await until(lambda: served.engine.live == 1)
        assert (await client.responses.retrieve(name)).status in ("queued", "in_progress")
        served.engine.hold_after = None
        own = [first.model_dump(mode="json")["type"], *[event.type async for event in stream]]
        events = await early
        assert [event["type"] for event in events] == own
        assert own[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            EVENT.validate_python(event)
        assert events[-1]["response"] == (await raw.get(f"/v1/responses/{name}")).json()
        for number in (0, len(events) - 2):
            assert await read(raw, name, starting_after=number) == events[number + 1 :]
        for number in (len(events) - 1, 999_999_999):
            assert await read(raw, name, starting_after=number) == []
        for wrong in ("-1", "x", "1.5", "9" * 5000):
            answer = await raw.get(
                f"/v1/responses/{name}", params={"stream": "true", "starting_after": wrong}
            )
            assert answer.json()["error"]["param"] == "starting_after"


async def test_a_reader_that_leaves_ends_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client, served.http() as raw:
        served.engine.hold_after = 5
        stream = await client.responses.create(**LOGGED)
        name = (await anext(stream)).response.id
        await stream.close()
        await until(lambda: served.engine.live == 1)
        served.engine.hold_after = None
        assert (await read(raw, name))[-1]["response"]["status"] == "incomplete"


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_an_end_from_outside_ends_the_events(tmp_path: Path, verb: str) -> None:
    async with stack(tmp_path) as served, sdk(served) as client, served.http() as raw:
        served.engine.hold_after = 5
        stream = await client.responses.create(**LOGGED)
        name = (await anext(stream)).response.id
        await until(lambda: served.engine.live == 1)
        await getattr(client.responses, verb)(name)
        last = [event async for event in stream][-1]
        assert (last.type, last.response["status"]) == ("response.cancelled", "cancelled")
        await until(lambda: served.engine.live == 0)
        if verb == "cancel":
            events = await read(raw, name)
            assert events[-1]["response"]["id"] == name
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert [event["type"] for event in events].count("response.cancelled") == 1
        else:
            assert (await raw.get(f"/v1/responses/{name}?stream=true")).status_code == 404


async def test_an_end_ahead_of_the_first_token_leaves_no_gap(tmp_path: Path) -> None:
    """That the response is in progress is told with its first token, or with what ends it."""
    async with stack(tmp_path) as served, sdk(served) as client, served.http() as raw:
        served.engine.hold_after = 0
        stream = await client.responses.create(**LOGGED)
        name = (await anext(stream)).response.id
        async with asyncio.timeout(PATIENCE_S):
            while (await client.responses.retrieve(name)).status != "in_progress":
                pass
        await client.responses.cancel(name)
        events = await read(raw, name)
        assert [(event["sequence_number"], event["type"]) for event in events] == list(enumerate([
            "response.created", "response.queued", "response.in_progress", "response.cancelled",
        ]))  # fmt: skip


async def test_failures_are_events(tmp_path: Path) -> None:
    """A prompt that turns out too long, and an engine that goes away."""
    async with stack(tmp_path) as served, sdk(served) as client, served.http() as raw:
        stream = await client.responses.create(**{**LOGGED, "input": "a" * 600})
        events = [event async for event in stream]
        assert [event.type for event in events] == [
            "response.created", "response.queued", "response.failed",
        ]  # fmt: skip
        assert events[-1].response.error.code == "invalid_prompt"
        served.engine.hold_after = 5
        stream = await client.responses.create(**LOGGED)
        name = (await anext(stream)).response.id
        while (await anext(stream)).type != "response.output_text.delta":
            pass  # before its first token it would be sent again
        served.engine.drop_sessions()
        assert [event.type async for event in stream][-1] == "response.failed"
        assert (await raw.get(f"/v1/responses/{name}")).json()["status"] == "failed"


async def test_events_count_on_the_shelf(tmp_path: Path, monkeypatch: Any) -> None:
    """They do while they are made: what does not fit fails, and others are kept. The text alone
    would not fit either, in however few events it comes."""
    monkeypatch.setattr(responses_making, "MAX_BYTES", 20_000)
    monkeypatch.setattr(responses_making, "_RECOUNT_BYTES", 1_000)
    engine = {"step_s": 0.001, "max_model_len": 1 << 14}
    async with stack(tmp_path, engine=engine) as served, sdk(served) as client:
        kept = await client.responses.create(**ASKED)
        stream = await client.responses.create(**{**LOGGED, "max_output_tokens": 12_000})
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert "20000 bytes" in last.response.error.message
        again = await client.responses.create(**ASKED)
        assert (await client.responses.retrieve(again.id)).id == again.id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(kept.id)


async def test_a_log_splits_what_it_gets() -> None:
    log = EventLog()
    log.add(b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n")
    reader = log.read(1)
    assert await anext(reader) == b"event: b\ndata: 2\n\n"
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    log.add(b"data: 3\n\n")
    assert await waiting == b"data: 3\n\n"
    log.close()
    assert [part async for part in reader] == []
    assert [part async for part in log.read(0)] == [
        b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\ndata: 3\n\n"
    ]


def test_developers_are_the_system_where_a_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    chat = Chat(messages=messages)
    assert [m["role"] for m in as_known(chat, "{{ role }}").messages] == ["system", "user"]
    assert as_known(chat, "{% if m.role == 'developer' %}") is chat
    assert messages[0]["role"] == "developer"
