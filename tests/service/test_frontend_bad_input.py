"""Wrong requests at both faces: a clear status, the field's name, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from tests.service.frontends import Stack, stack
from tests.waiting import PATIENCE_S, until
from tidemill.client import AsyncClient
from tidemill.exchange import CallOptions
from tidemill.runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServiceError,
)
from tidemill.runtime.rpc import to_error
from tidemill.sampling_params import SamplingParams
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

LONG = "a" * 600
NESTED = {"params": {"k": json.loads("[" * 46 + '{"a": 1}' + "]" * 46)}}  # ended the session
UNKNOWN_KNOB = {"prompt": "a", "decoding": {"params": {"bogus": 1}}}
HTTP = {
    "empty prompt": ({"prompt": ""}, 400, "prompt"),
    "no tokens": ({"prompt": []}, 400, "prompt"),
    "missing prompt": ({}, 400, "prompt"),
    "prompt too long": ({"prompt": LONG}, 400, "prompt"),
    "prompt and output too long": ({"prompt": "a", "max_tokens": 512}, 400, "prompt"),
    "token id out of range": ({"prompt": [5, 99_999]}, 400, "prompt"),
    "negative token id": ({"prompt": [-1]}, 400, "prompt"),
    "temperature -1": ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    "top_p 0": ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    "n 0": ({"prompt": "a", "n": 0}, 400, "n"),
    "n too large": ({"prompt": "a", "n": 99}, 400, "n"),
    "negative max_tokens": ({"prompt": "a", "max_tokens": -3}, 400, "max_tokens"),
    "max_tokens 0 without echo": ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "unknown model": ({"prompt": "a", "model": "gpt-9"}, 404, "model"),
    "unknown knob": (UNKNOWN_KNOB, 400, "decoding.params.bogus"),
    "nested knob": ({"prompt": "a", "decoding": NESTED}, 400, "decoding.params.k"),
    "wrong type": ({"prompt": "a", "temperature": {"a": 1}}, 400, "temperature"),
    "too many stops": ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
    "empty stop": ({"prompt": "a", "stop": [""]}, 400, "stop"),
    "too many logprobs": ({"prompt": "a", "logprobs": 6}, 400, "logprobs"),
    "stop token out of range": ({"prompt": "a", "stop_token_ids": [-1]}, 400, "stop_token_ids"),
    "truncation": ({"prompt": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    "unserved": ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "cache_salt too long": ({"prompt": "a", "cache_salt": "s" * 1025}, 400, "cache_salt"),
    "too many sequences": ({"prompt": ["a"] * 65, "n": 16}, 400, "n"),
    "logprobs true": ({"prompt": "a", "logprobs": True}, 400, "logprobs"),
    "top_logprobs": ({"prompt": "a", "top_logprobs": 1}, 400, "top_logprobs"),
    "a knob of 20,000 characters": ({"prompt": "a", "k" * 20_000: 1, "n": 0}, 400, "n"),
    "a model of 2,100 emoji": ({"prompt": "a", "model": "\N{DOLPHIN}" * 2100}, 404, "model"),
}  # fmt: skip

CHAT = {
    "tool_calls 5": ([{"role": "assistant", "tool_calls": 5}], {}, "messages[0].tool_calls"),
    "tool_calls {}": ([{"role": "assistant", "tool_calls": {}}], {}, "messages[0].tool_calls"),
    "no content": ([{"role": "user"}], {}, "messages[0].content"),
    "no parts": ([{"role": "user", "content": []}], {}, "messages[0].content"),
    "echo": ([{"role": "user", "content": "a"}], {"echo": True}, "echo"),
    "continue a user": (
        [{"role": "user", "content": "a"}],
        {"continue_final_message": True},
        "continue_final_message",
    ),
    "stream_options": (
        [{"role": "user", "content": "a"}],
        {"stream_options": {"include_usage": True}},
        "stream_options",
    ),
}  # fmt: skip


@pytest.fixture
async def served(tmp_path: Path) -> Any:
    async with stack(tmp_path, max_body_bytes=1 << 20, max_message_bytes=4 << 20) as running:
        before = len(asyncio.all_tasks())
        yield running
        desk = running.frontend.desk
        await until(lambda: running.engine.live == desk.num_live == desk.fleet.num_slots == 0)
        # Open connections only, no requests.
        await until(lambda: len(asyncio.all_tasks()) <= before + 4)


async def test_http_table(served: Stack) -> None:
    async with served.http() as client:
        for name, (body, status, param) in HTTP.items():
            for stream in (False, True):
                answer = await client.post("/v1/completions", json={**body, "stream": stream})
                assert answer.status_code == status, (name, answer.text)
                error = answer.json()["error"]
                assert error["param"] == param, (name, error)
                assert error["message"], name
                assert error["type"] in ("invalid_request_error", "not_found_error"), name


@pytest.mark.parametrize("name", CHAT)
async def test_chat_table(served: Stack, name: str) -> None:
    messages, fields, param = CHAT[name]
    async with served.http() as client:
        answer = await client.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("streams", [False, True])
async def test_bugs_get_the_envelope_too(
    served: Stack, monkeypatch: pytest.MonkeyPatch, caplog: Any, streams: bool
) -> None:
    def broken(*given: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("frontend.generation.check_request", broken)
    async with served.http() as client:
        body = {"prompt": "a", "stream": streams}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        counted = (await client.get("/metrics")).text
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "internal error: ZeroDivisionError: a bug",
        "type": "internal_error",
        "param": None,
        "code": "internal",
    }
    assert answer.headers["x-request-id"] == "mine"
    assert 'handler="/v1/completions",method="POST",status="500"} 1.0' in counted
    (record,) = [one for one in caplog.records if one.exc_info]
    assert "ZeroDivisionError" in caplog.text
    assert record.name == "tidemill.frontend.http"


async def test_a_client_that_leaves_a_stream_is_no_error(served: Stack, caplog: Any) -> None:
    served.engine.step_s = 0.01
    async with served.http() as client:
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: served.engine.live == 0)
    await until(lambda: served.frontend.desk.num_live == 0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_long_names_reach_grpc_clients_as_what_they_are(served: Stack) -> None:
    async with AsyncClient(served.grpc_address) as client:
        with pytest.raises(NotFound, match="The model '\N{DOLPHIN}") as caught:
            await client.generate("a", options=CallOptions(model="\N{DOLPHIN}" * 2100))
        assert caught.value.reason == "MODEL_NOT_FOUND"
        with pytest.raises(InvalidRequest, match="1025 characters; it may have 1024"):
            await client.generate("a", options=CallOptions(cache_salt="s" * 1025))
        with pytest.raises(InvalidRequest, match="has 200 characters; it must have at most 128"):
            await client.generate("a", options=CallOptions(request_id="i" * 200))


async def test_a_scored_prompt_needs_room_for_one_token(served: Stack) -> None:
    async with served.http() as client:
        body = {"prompt": [97] * 512, "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = await client.post("/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "(max_tokens 0) the engine computes one token more" in error["message"]
        assert "to 511 tokens, or use truncate_prompt_tokens" in error["message"]
        fits = await client.post("/v1/completions", json={**body, "prompt": [97] * 511})
        assert len(fits.json()["choices"][0]["logprobs"]["tokens"]) == 511
        cut = await client.post("/v1/completions", json={**body, "truncate_prompt_tokens": -1})
        assert len(cut.json()["choices"][0]["logprobs"]["tokens"]) == 511


async def test_tokenize_refuses_flags_of_messages_beside_a_text(served: Stack) -> None:
    async with served.http() as client:
        for name, value in (
            ("add_generation_prompt", True),
            ("continue_final_message", False),
            ("chat_template_kwargs", {}),
            ("tools", []),
        ):
            answer = await client.post("/tokenize", json={"prompt": "a", name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_context_overflow_has_the_words_that_clients_look_for(served: Stack) -> None:
    async with served.http() as client:
        messages = [{"role": "user", "content": LONG}]
        answer = await client.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith("This model's maximum context length is 512 tokens.")
        assert error["message"].endswith("(context_length_exceeded)")
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "messages"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (602, 512)
    async with AsyncClient(served.grpc_address) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.chat(LONG)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    facts = {"n_prompt_tokens": "602", "n_completion_tokens": "1", "n_ctx": "512"}
    assert caught.value.facts == facts


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "param"),
    [
        ("", {}, InvalidRequest, "prompt"),
        ([], {}, InvalidRequest, "prompt"),
        (LONG, {}, InvalidRequest, "prompt"),
        ([99_999], {}, InvalidRequest, "prompt"),
        ("a", {"temperature": -1.0}, InvalidRequest, "temperature"),
        ("a", {"temperature": math.nan}, InvalidRequest, "temperature"),
        ("a", {"top_p": 0.0}, InvalidRequest, "top_p"),
        ("a", {"n": 0}, InvalidRequest, "n"),
        ("a", {"max_tokens": -3}, InvalidRequest, "max_tokens"),
        ("a", {"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ("a", {"method_params": {"bogus": 1}}, InvalidRequest, "decoding.params.bogus"),
        ("a", {"stop": ["x"] * 17}, InvalidRequest, "stop"),
    ],
)
async def test_grpc_table(
    served: Stack, prompt: Any, params: dict[str, Any], kind: type[ServiceError], param: str
) -> None:
    async with AsyncClient(served.grpc_address) as client:
        chosen = SamplingParams(**params)
        with pytest.raises(kind) as caught:
            await client.generate(prompt, chosen)
        assert caught.value.param == param
        with pytest.raises(kind) as caught:
            async for _ in client.generate_stream(prompt, chosen):
                pass
        assert caught.value.param == param


async def test_grpc_unknown_model_and_unserved_fields(served: Stack) -> None:
    async with AsyncClient(served.grpc_address) as client:
        with pytest.raises(NotFound) as caught:
            await client.generate("a", options=CallOptions(model="gpt-9"))
        assert caught.value.reason == "MODEL_NOT_FOUND"
        with pytest.raises(InvalidRequest) as refused:
            await client.generate("a", options=CallOptions(priority=2**40))
        assert refused.value.param == "x-priority"
    user = {"role": "user", "parts": [{"text": "a"}]}
    unserved: dict[str, dict[str, Any]] = {
        "tools": {"chat": {"tools": [{"name": "f"}]}},
        "reasoning_effort": {"chat": {"reasoning_effort": "low"}},
        "messages[0].parts": {"messages": [{"role": "user", "parts": [{"image_url": "x"}]}]},
    }
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = rpc.TextServiceStub(channel)
        for param, fields in unserved.items():
            request = {"messages": [user], **fields}
            for call in (
                stub.Chat(pb.ChatRequest(**request)),
                stub.ChatStream(pb.ChatStreamRequest(**request)).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call
                assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED, param
                assert to_error(failed.value).param == param
        for wrong in ({"role": "user"}, {"role": "user", "parts": [{}]}):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.Chat(pb.ChatRequest(messages=[wrong]))
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert to_error(failed.value).param == "messages[0].parts"
    assert served.engine.submits == []


async def test_bodies_that_are_not_requests(served: Stack) -> None:
    async with served.http() as client:
        post = client.post
        for content in (
            b"",
            b"{",
            b"\xff\xfe",
            b'{"prompt": "\xff"}',
            b'{"prompt":"a","top_p":NaN}',
        ):
            answer = await post("/v1/completions", content=content)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_json"
        large = b'{"prompt": "' + b"a" * (2 << 20) + b'"}'
        answer = await post("/v1/completions", content=large)
        assert answer.status_code == 413
        assert "1048576" in answer.json()["error"]["message"]

        async def unknown_length() -> Any:
            for _ in range(20):
                yield b"a" * (1 << 17)

        answer = await post("/v1/completions", content=unknown_length())
        assert answer.status_code == 413
        for path, verbs in (("/v1/completions", "POST"), ("/v1/responses/x", "DELETE, GET")):
            answer = await client.put(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, verbs)
        assert (await post("/v1/nothing", json={})).status_code == 404
        bad_id = {"x-request-id": "a" * 200}
        answer = await post("/v1/completions", json={"prompt": "a"}, headers=bad_id)
        assert answer.json()["error"]["param"] == "x-request-id"
        assert "has 200 characters; it must have 1 to 128" in answer.json()["error"]["message"]
        for bad in ("soon", "0", "-1", "1.5", "9" * 16, "9" * 5000):
            bad_time = {"x-request-timeout-ms": bad}
            answer = await post("/v1/completions", json={"prompt": "a"}, headers=bad_time)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "x-request-timeout-ms"
            assert f"({len(bad)} characters)" in answer.json()["error"]["message"]


async def test_malformed_protobuf_and_text(served: Stack) -> None:
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        for content in (b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe"):
            call = channel.unary_unary("/tidemill.v1.TextService/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(content)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            stream = channel.unary_stream("/tidemill.v1.TextService/GenerateStream")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream(content).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = channel.unary_unary(
            "/tidemill.v1.TextService/Generate",
            request_serializer=pb.TextServiceGenerateRequest.SerializeToString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(pb.TextServiceGenerateRequest(prompt={"text": "a" * (6 << 20)}))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_full_queue_is_429_with_retry_after(served: Stack) -> None:
    served.engine.refuse = Overloaded("1024 requests are waiting", retry_after_ms=1500)
    async with served.http() as client:
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "2"
            assert answer.headers["retry-after-ms"] == "1500"
            assert answer.json()["error"]["code"] == "queue_full"
    async with AsyncClient(served.grpc_address) as client:
        with pytest.raises(Overloaded) as caught:
            await client.generate("a")
    assert caught.value.retry_after_ms == 1500


async def test_an_engine_that_does_not_read_is_429(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.outbox.MAX_UNSENT_BYTES", -1)
    async with served.http() as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "engine_not_reading"
    assert served.engine.submits == []


async def test_deadlines(served: Stack) -> None:
    served.engine.hold = True
    async with served.http() as client:
        for milliseconds in ("1", "50"):
            headers = {"x-request-timeout-ms": milliseconds}
            answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
    await until(lambda: served.engine.outcomes == ["deadline", "deadline"])
    async with AsyncClient(served.grpc_address) as client:
        seconds = 0.001
        while len(served.engine.submits) == 2:  # the first calls may never leave the client
            seconds *= 2
            assert seconds < PATIENCE_S
            with pytest.raises(DeadlineExceeded):
                await client.generate("a", options=CallOptions(timeout_s=seconds))
    assert all(0 < spec.timeout_ms <= 1000 * max(seconds, 0.05) for spec in served.engine.submits)
    await until(lambda: served.engine.live == 0)
    # The client's clock may run out before the server's: then it is the client who ends the call.
    assert set(served.engine.outcomes) <= {"deadline", "aborted"}


async def test_a_deadline_in_the_middle_of_a_stream(served: Stack) -> None:
    served.engine.hold_after = 3
    stream, ms = None, 125
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as sdk:
        while stream is None:  # until there is time for the first token on this machine
            ms *= 2
            assert ms < 1000 * PATIENCE_S
            timeout = {"x-request-timeout-ms": str(ms)}
            with suppress(openai.APIStatusError):
                stream = await sdk.completions.create(
                    model="fake", prompt="a", stream=True, extra_headers=timeout
                )
        with pytest.raises(openai.APIError, match=rf"did not finish within {ms / 1000:.3f} s"):
            async for _ in stream:
                pass
