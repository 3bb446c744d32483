"""The OpenAI face with the official SDK against a real server; the engine is a fake that echoes."""

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

from tests.service.frontends import Stack, stack
from tests.waiting import PATIENCE_S, until

HI = [{"role": "user", "content": "hi é"}]


@asynccontextmanager
async def sdk(served: Stack, **fields: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="any", max_retries=0, **fields
    ) as client:
        yield client


async def test_completion(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        answer = await client.completions.create(model="fake", prompt="tide", max_tokens=6)
        assert answer.id.startswith("cmpl-")
        assert answer.object == "text_completion"
        assert answer.choices[0].text == "tideti"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == 4
        assert answer.usage.completion_tokens == 6
        assert answer.usage.total_tokens == 10
        assert answer.usage.prompt_tokens_details.cached_tokens == 2
        default = await client.completions.create(model="fake", prompt="x")
        assert default.choices[0].text == "x" * 16
        assert served.engine.live == 0


async def test_chat_fills_the_room_by_default(tmp_path: Path) -> None:
    async with stack(tmp_path, engine={"max_model_len": 32}) as served, sdk(served) as client:
        answer = await client.chat.completions.create(model="fake", messages=HI)
        assert answer.id.startswith("chatcmpl-")
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage.prompt_tokens == 7
        assert answer.usage.completion_tokens == 25
        assert not served.engine.submits[0].sampling.HasField("max_tokens")


async def test_chat_stream_has_the_shape_that_clients_rely_on(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="fake",
                messages=HI,
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "hi é"
    finish = chunks[-2].choices[0]
    assert finish.finish_reason == "length"
    assert finish.delta.model_dump(exclude_none=True) == {}
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_raw_stream_ends_with_done_and_no_usage_unless_asked(tmp_path: Path) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "stream": True}
    async with stack(tmp_path) as served, served.http() as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert "".join(c["choices"][0]["text"] for c in chunks) == "aba"
        assert all("usage" not in chunk for chunk in chunks)
        options = {"continuous_usage_stats": True}
        answer = await client.post("/v1/completions", json={**body, "stream_options": options})
        lines = answer.text.split("\n\n")[:-2]
        counts = [json.loads(line[6:])["usage"]["completion_tokens"] for line in lines]
        assert counts[-1] == 3
        assert counts == sorted(counts)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("per_step", [1, 3, 8])
async def test_stop_strings_across_tokens_and_deltas(
    tmp_path: Path, streams: bool, per_step: int
) -> None:
    prompt = "one é END two"
    engine = {"tokens_per_step": per_step, "max_model_len": 1 << 20}
    async with stack(tmp_path, engine=engine) as served:
        async with sdk(served) as client:
            create = client.completions.create
            fields = {"model": "fake", "prompt": prompt, "max_tokens": 10**6, "stop": ["END", "no"]}
            if streams:
                options = {"include_usage": True}
                chunks = [
                    c async for c in await create(**fields, stream=True, stream_options=options)
                ]
                text = "".join(c.choices[0].text for c in chunks[:-1])
                usage, last = chunks[-1].usage, chunks[-2].choices[0]
            else:
                answer = await create(**fields)
                text, usage, last = answer.choices[0].text, answer.usage, answer.choices[0]
        assert text == "one é "
        assert last.finish_reason == "stop"
        assert last.stop_reason == "END"
        assert usage.completion_tokens == len(b"one \xc3\xa9 END")
        await until(lambda: served.engine.outcomes == ["stop_string"])


async def test_several_prompts_and_choices(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        answer = await client.completions.create(
            model="fake", prompt=["ab", "xyz"], n=2, max_tokens=4
        )
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert [c.text for c in answer.choices] == ["abab", "abab", "xyzx", "xyzx"]
        assert answer.usage.prompt_tokens == 5
        assert answer.usage.completion_tokens == 16
        specs = served.engine.submits
        assert [spec.choice for spec in specs] == [0, 1, 0, 1]
        assert len({spec.group for spec in specs}) == 1
        ids = await client.completions.create(model="fake", prompt=[[97], [98, 99]], max_tokens=2)
        assert [c.text for c in ids.choices] == ["aa", "bc"]


async def test_chat_logprobs(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        answer = await client.chat.completions.create(
            model="fake", messages=HI, max_tokens=5, logprobs=True, top_logprobs=2
        )
        entries = answer.choices[0].logprobs.content
        assert len(entries) == answer.usage.completion_tokens
        assert entries[1].token == "h"
        assert entries[1].logprob == pytest.approx(-1.04)
        assert [top.token for top in entries[1].top_logprobs] == ["h", "g"]
        assert entries[4].bytes == [0xC3]
        assert bytes(b for e in entries[1:] for b in e.bytes) == "hi é".encode()[:4]


async def test_echo_scores_the_prompt(tmp_path: Path) -> None:
    """What lm-eval asks for: token-id prompts, echo, logprobs, no or one token."""
    async with stack(tmp_path) as served, sdk(served) as client:
        for max_tokens in (0, 1):
            answer = await client.completions.create(
                model="fake", prompt=[97, 98, 99], max_tokens=max_tokens, echo=True, logprobs=1
            )
            choice = answer.choices[0]
            assert choice.text == "abca"[: 3 + max_tokens]
            assert choice.logprobs.tokens == list("abca")[: 3 + max_tokens]
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.token_logprobs[1:3] == pytest.approx([-0.98, -0.99])
            assert choice.logprobs.top_logprobs[0] is None
            assert choice.logprobs.top_logprobs[1] == pytest.approx({"b": -0.98})
            assert choice.logprobs.text_offset == [0, 1, 2, 3][: 3 + max_tokens]
            assert answer.usage.completion_tokens == max_tokens
        plain = await client.completions.create(model="fake", prompt="ab", max_tokens=2, echo=True)
        assert plain.choices[0].text == "abab"


async def test_prompt_logprobs_and_token_ids(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        extra = {"prompt_logprobs": 1, "return_token_ids": True}
        answer = await client.completions.create(
            model="fake", prompt="ab", max_tokens=2, extra_body=extra
        )
        choice = answer.choices[0].model_dump()
        assert choice["token_ids"] == [97, 98]
        assert choice["prompt_token_ids"] == [97, 98]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1]["98"]["decoded_token"] == "b"
        chat = await client.chat.completions.create(
            model="fake", messages=HI, max_tokens=2, extra_body=extra
        )
        assert chat.model_dump()["prompt_token_ids"] == [261, 104, 105, 32, 0xC3, 0xA9, 262]


async def events_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await client.post(path, json={**body, "stream": True})
    return [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]


async def test_streams_carry_prompt_logprobs_once(tmp_path: Path) -> None:
    """They equal those of the answer in one piece; a half character holds the first text back."""
    async with stack(tmp_path) as served, served.http() as client:
        for path, body in (
            ("/v1/completions", {"prompt": ["éb", "c"], "n": 2, "max_tokens": 4}),
            ("/v1/completions", {"prompt": ["éb", "c"], "n": 2, "echo": True, "logprobs": 3}),
            ("/v1/chat/completions", {"messages": HI, "n": 2, "max_tokens": 3}),
        ):
            body["prompt_logprobs"] = 1
            whole = (await client.post(path, json=body)).json()
            events = await events_of(client, path, body)
            if "prompt" in body:
                expected = {c["index"]: c["prompt_logprobs"] for c in whole["choices"]}
                assert [len(scores) for scores in expected.values()] == [3, 3, 1, 1]
                places = [choice for event in events for choice in event["choices"]]
                found = [c for c in places if "prompt_logprobs" in c]
                assert {c["index"]: c["prompt_logprobs"] for c in found} == expected
                assert len(found) == 4
                assert found[0] is places[0]
            else:
                found = [event for event in events if "prompt_logprobs" in event]
                assert [event["prompt_logprobs"] for event in found] == [whole["prompt_logprobs"]]
                assert len(whole["prompt_logprobs"]) == 7
            del body["prompt_logprobs"]
            assert "prompt_logprobs" not in json.dumps(await events_of(client, path, body))


@pytest.mark.parametrize(
    "prompt", [{"prompt": "abc"}, {"prompt": [97, 98, 99]}, {"prompt": "xabc", "truncate": 3}]
)
async def test_offsets_count_from_the_start_of_the_prompt(
    tmp_path: Path, prompt: dict[str, Any]
) -> None:
    body = {"prompt": prompt["prompt"], "max_tokens": 3, "logprobs": 0}
    if "truncate" in prompt:
        body["truncate_prompt_tokens"] = prompt["truncate"]
    async with stack(tmp_path) as served, served.http() as client:
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["text_offset"] == [3, 4, 5]


@pytest.mark.parametrize("streams", [False, True])
async def test_half_characters_have_names_and_offsets(tmp_path: Path, streams: bool) -> None:
    body = {"prompt": "R: é", "max_tokens": 6, "logprobs": 1, "echo": True}
    async with stack(tmp_path) as served, served.http() as client:
        if streams:
            events = await events_of(client, "/v1/completions", body)
            parts = [event["choices"][0]["logprobs"] for event in events]
            shown = {name: [x for part in parts for x in part[name]] for name in parts[0]}
        else:
            answer = await client.post("/v1/completions", json=body)
            shown = answer.json()["choices"][0]["logprobs"]
    half, rest = "bytes:\\xc3", "bytes:\\xa9"
    assert shown["tokens"] == ["R", ":", " ", half, rest, "R", ":", " ", half, rest, "R"]
    assert shown["text_offset"] == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8]
    assert shown["top_logprobs"][3] == pytest.approx({half: -1.95})
    assert set(shown["top_logprobs"][4]) == {rest}


async def test_the_user_stands_in_the_log_line(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "tidemill.frontend.request")
    async with stack(tmp_path) as served, sdk(served) as client:
        await client.completions.create(model="fake", prompt="a", user="tenant-7" + "x" * 200)
        await client.completions.create(model="fake", prompt="a")
    first, second = (one for one in caplog.records if one.name == "tidemill.frontend.request")
    assert first.user == "tenant-7" + "x" * 120
    assert not hasattr(second, "user")


async def test_every_parameter_reaches_the_engine(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        await client.completions.create(
            model="fake",
            prompt="abcdef",
            max_tokens=4,
            temperature=0.25,
            top_p=0.5,
            seed=-1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"97": 2.0},
            logprobs=0,
            extra_body={
                "top_k": 0,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "min_tokens": 2,
                "stop_token_ids": [33],
                "ignore_eos": True,
                "priority": 3,
                "cache_salt": "s",
                "truncate_prompt_tokens": 2,
                "threshold": 0.75,
                "decoding": {"method": "autoregressive", "params": {"steps": 3}},
            },
            extra_headers={"X-Request-Id": "req-1", "x-request-timeout-ms": "500000"},
        )
        (spec,) = served.engine.submits
    given = spec.sampling
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.25, 0.5, 0, 0.125)
    assert given.HasField("top_k")
    assert given.seed == 2**64 - 1
    assert given.repetition_penalty == 1.5
    assert (given.presence_penalty, given.frequency_penalty) == (0.5, -0.5)
    assert dict(given.logit_bias) == {97: 2.0}
    assert (given.max_tokens, given.min_tokens) == (4, 2)
    assert list(spec.stop.token_ids) == [33]
    assert spec.stop.ignore_eos
    assert spec.logprobs.HasField("top")
    assert not spec.logprobs.HasField("prompt_top")
    assert (spec.priority, spec.cache_salt, spec.request_id) == (3, "s", "req-1")
    assert spec.prompt_token_ids == b"e\0\0\0f\0\0\0"
    assert 400_000 < spec.timeout_ms <= 500_000
    assert spec.decoding.method == "autoregressive"
    assert dict(spec.decoding.params) == {"threshold": 0.75, "steps": 3}


async def test_request_ids_are_echoed(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        body = {"prompt": "a", "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        assert answer.json()["id"] == "cmpl-mine"
        other = await client.get("/health")
        assert len(other.headers["x-request-id"]) == 32


async def test_canvas_events_on_demand(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, engine={"mask_token_id": 264}) as served,
        served.http() as client,
    ):
        body = {"prompt": "ab", "max_tokens": 3, "stream": True}
        plain = await client.post("/v1/completions", json=body)
        assert "canvas" not in plain.text
        served.engine.hold_after = 1  # newer tokens would overtake the canvas
        body["stream_options"] = {"include_canvas": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if '"canvas"' in line:
                    shown = json.loads(line.removeprefix("data: "))
                    break
    assert shown["choices"] == []
    assert shown["canvas"]["block"] == 2
    assert shown["canvas"]["text"][1] == "\u2591"
    assert shown["canvas"]["fixed"] == [True, False]
    assert shown["canvas"]["confidence"] == [0.75, 0.5]


async def test_models_tokenize_and_version(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, served_model_name="sea") as served,
        sdk(served) as client,
        served.http() as raw,
    ):
        (card,) = (await client.models.list()).data
        assert (card.id, card.model_dump()["max_model_len"]) == ("sea", 512)
        assert (await client.models.retrieve("sea")).id == "sea"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("claude-9")
        answer = (await raw.post("/tokenize", json={"prompt": "hello"})).json()
        assert answer["tokens"] == [258, 111]
        assert (answer["count"], answer["max_model_len"]) == (2, 512)
        answer = (await raw.post("/tokenize", json={"messages": HI})).json()
        assert answer["tokens"][0] == 261
        answer = (await raw.post("/detokenize", json={"tokens": [258, 111]})).json()
        assert answer == {"prompt": "hello"}
        assert "version" in (await raw.get("/version")).json()
        assert (await raw.get("/openapi.json")).status_code == 200


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    ttft = 'tidemill_time_to_first_token_seconds_count{model_name="fake"} 1.0'
    async with stack(tmp_path, engine={"hold_after": 1}) as served, served.http() as client:
        body = {"prompt": "ab", "max_tokens": 3, "n": 2}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(PATIENCE_S):
            while ttft not in (await client.get("/metrics")).text:
                pass
        served.engine.hold_after = None  # only now, or all tokens could come in one piece
        await asked
        await client.post("/v1/completions", json={"prompt": "ab", "temperature": -1})
        text = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model_name="fake"}'
    assert (
        values['tidemill_request_success_total{finished_reason="length",model_name="fake"}']
        == "2.0"
    )
    assert values[f"tidemill_prompt_tokens_total{label}"] == "2.0"
    assert values[f"tidemill_generation_tokens_total{label}"] == "6.0"
    assert values[f"tidemill_time_to_first_token_seconds_count{label}"] == "1.0"
    assert values[f"tidemill_e2e_request_latency_seconds_count{label}"] == "1.0"
    assert float(values[f"tidemill_inter_token_latency_seconds_count{label}"]) >= 1
    assert values[f"tidemill_num_requests_waiting{label}"] == "1.0"
    assert values[f"tidemill_kv_cache_usage_perc{label}"] == "0.25"
    failed = 'tidemill_request_failure_total{error_type="invalid_argument",model_name="fake"}'
    assert values[failed] == "1.0"
    route = 'handler="/v1/completions",method="POST",status="400"'
    assert values[f"tidemill_http_requests_total{{{route}}}"] == "1.0"
