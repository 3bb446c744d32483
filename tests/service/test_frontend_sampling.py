"""What the frontend makes of sampling parameters itself; the fake engine echoes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.frontends import stack
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

HI = [{"role": "user", "content": "hi é"}]


async def test_best_of_asks_for_scores_that_the_client_does_not_see(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        body = {"prompt": ["ab", "c"], "best_of": 3, "n": 2, "max_tokens": 4}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        assert [c["text"] for c in answer["choices"]] == ["abab", "abab", "cccc", "cccc"]
        assert all(c["logprobs"] is None for c in answer["choices"])
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 24)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        assert [spec.choice for spec in served.engine.submits] == [0, 1, 2, 0, 1, 2]
        assert all(spec.logprobs.HasField("top") for spec in served.engine.submits)
        served.engine.submits.clear()
        body |= {"best_of": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert len(answer["choices"]) == len(served.engine.submits) == 4
        assert not any(spec.logprobs.HasField("top") for spec in served.engine.submits)


async def test_best_of_over_grpc(tmp_path: Path) -> None:
    message = {"role": "user", "parts": [{"text": "hi"}]}
    async with (
        stack(tmp_path, engine={"mask_token_id": 264}) as served,
        grpc.aio.insecure_channel(served.grpc_address) as channel,
    ):
        stub, options = rpc.TextServiceStub(channel), {"best_of": 3, "sampling": {"max_tokens": 2}}
        answer = await stub.Chat(pb.ChatRequest(messages=[message], options=options))
        assert (len(answer.choices), answer.usage.output_tokens) == (1, 6)
        filled = await stub.Infill(
            pb.InfillRequest(prefix="ab", suffix="!", gap_tokens=3, options={"best_of": 2})
        )
        assert (filled.text, filled.usage.output_tokens) == ("aba", 6)
        for stream in (
            stub.ChatStream(pb.ChatStreamRequest(messages=[message], options=options)),
            stub.GenerateStream(pb.GenerateStreamRequest(prompt={"text": "a"}, options=options)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "best_of" in caught.value.details()


async def test_prompt_ids_come_first_even_before_a_canvas(tmp_path: Path) -> None:
    """Once in a stream over gRPC, once for each choice over HTTP."""
    engine = {"mask_token_id": 264, "tokens_per_step": 1}
    prompt = [261, 104, 105, 32, 0xC3, 0xA9, 262]
    async with (
        stack(tmp_path, engine=engine) as served,
        served.http() as client,
        grpc.aio.insecure_channel(served.grpc_address) as channel,
    ):
        body: dict[str, Any] = {"messages": HI, "max_tokens": 7, "n": 2, "return_token_ids": True}
        body |= {"stream": True, "stream_options": {"include_canvas": True}}
        answer = await client.post("/v1/chat/completions", json=body)
        chunks = [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]
        assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [prompt] * 2
        places = [place for chunk in chunks for place in chunk["choices"]]
        for index in range(2):
            own = [place for place in places if place["index"] == index]
            assert [i for place in own for i in place.get("token_ids") or []] == prompt
        options = {"sampling": {"max_tokens": 7}, "return_token_ids": True, "emit_canvas": True}
        message = {"role": "user", "parts": [{"text": "hi é"}]}
        stub = rpc.TextServiceStub(channel)
        stream = stub.ChatStream(pb.ChatStreamRequest(messages=[message], options=options))
        news = [list(one.prompt_token_ids) async for one in stream]
        assert news == [prompt] + [[]] * (len(news) - 1)


async def test_an_echo_of_special_tokens_reads_like_the_answer(tmp_path: Path) -> None:
    """Byte-level vocabularies put no spaces between tokens, so both values say the same."""
    async with stack(tmp_path) as served, served.http() as client:
        user, system = map(served.tokenizer.token_to_id, ("<|user|>", "<|system|>"))
        body: dict[str, Any] = {"prompt": [user, system], "max_tokens": 2, "echo": True}
        for spaces in (True, False):
            flags = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
            answer = await client.post("/v1/completions", json={**body, **flags})
            assert answer.json()["choices"][0]["text"] == "<|user|><|system|>" * 2
        hidden = await client.post("/v1/completions", json={**body, "skip_special_tokens": True})
        assert hidden.json()["choices"][0]["text"] == ""
