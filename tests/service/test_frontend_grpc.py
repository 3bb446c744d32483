"""TextService through the Python clients, on a real server; the engine is a fake that echoes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.frontends import Stack, stack
from tests.waiting import until
from tidemill.client import AsyncClient, Client
from tidemill.exchange import CallOptions
from tidemill.runtime.errors import InvalidRequest, NotFound, Unsupported
from tidemill.sampling_params import SamplingParams
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

HI = [{"role": "user", "content": "hi é"}]


@pytest.fixture
async def served(tmp_path: Path) -> Any:
    async with stack(tmp_path) as running:
        yield running
        await until(lambda: running.frontend.desk.fleet.num_slots == 0)


async def test_async_client(served: Stack) -> None:
    async with AsyncClient(served.grpc_address) as client:
        answer = await client.generate("tide", SamplingParams(max_tokens=6))
        assert answer.text == "tideti"
        assert answer.id.startswith("cmpl-")
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (4, 6)
        assert (answer.usage.cached_tokens, answer.usage.forward_passes) == (2, 6)
        assert (answer.timings.queue_ns, answer.timings.decode_ns) == (2, 4)
        chat = await client.chat("hi", SamplingParams(max_tokens=4, n=2))
        assert [choice.text for choice in chat.choices] == ["hi", "hi"]
        assert await client.tokenize("hello") == [258, 111]
        assert await client.tokenize(HI) == [261, 104, 105, 32, 0xC3, 0xA9, 262]
        assert await client.detokenize([258, 111]) == "hello"
        special = [258, 111, served.tokenizer.token_to_id("<|eos|>")]
        assert await client.detokenize(special) == "hello"
        assert await client.detokenize(special, skip_special_tokens=False) == "hello<|eos|>"
        (card,) = await client.list_models()
        assert (card.id, card.max_model_len) == ("fake", 512)
        assert (await client.get_model("fake")).id == "fake"
        with pytest.raises(NotFound):
            await client.get_model("other")


async def test_streams(served: Stack) -> None:
    async with AsyncClient(served.grpc_address) as client:
        deltas = [d async for d in client.generate_stream("é!", SamplingParams(max_tokens=7))]
        assert "".join(delta.text for delta in deltas) == "é!é!\ufffd"
        assert deltas[-1].choice is None
        assert deltas[-1].usage.output_tokens == 7
        assert deltas[-2].choice.finish_reason == "length"
        chosen = SamplingParams(max_tokens=30, stop="i é")
        deltas = [d async for d in client.chat_stream(HI, chosen)]
        assert "".join(delta.text for delta in deltas) == "h"
        assert deltas[-2].choice.stop_reason == "i é"
        assert deltas[-1].usage.output_tokens == 6


def run_blocking(address: str) -> list[object]:
    with Client(address) as client:
        text = client.generate("ab", SamplingParams(max_tokens=3)).text
        chat = client.chat(HI, SamplingParams(max_tokens=3)).text
        stream = [d.text for d in client.generate_stream("ab", SamplingParams(max_tokens=2))]
        for delta in client.chat_stream(HI, SamplingParams(max_tokens=400)):
            if delta.text:
                break  # must end the call
        ids = client.tokenize("hello")
        models = [card.id for card in client.list_models()]
        with pytest.raises(NotFound):
            client.generate("a", options=CallOptions(model="other"))
        return [text, chat, "".join(stream), ids, client.detokenize(ids), models]


async def test_the_blocking_client(served: Stack) -> None:
    served.engine.step_s = 0.005
    found = await asyncio.to_thread(run_blocking, served.grpc_address)
    assert found == ["aba", "hi", "ab", [258, 111], "hello", ["fake"]]
    await until(lambda: served.engine.live == 0)
    assert served.engine.outcomes[-1] == "aborted"


async def test_leaving_async_for_early_stops_the_engine(served: Stack) -> None:
    served.engine.step_s = 0.005
    async with AsyncClient(served.grpc_address) as client:
        async for delta in client.generate_stream("ab", SamplingParams(max_tokens=500)):
            if delta.text:
                break
        await until(lambda: served.engine.live == 0)
    assert served.engine.outcomes == ["aborted"]


async def test_trailers_carry_usage_and_timings(served: Stack) -> None:
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = rpc.TextServiceStub(channel)
        call = stub.Generate(pb.TextServiceGenerateRequest(prompt={"text": "ab"}))
        await call
        trailers = dict(await call.trailing_metadata())
        assert trailers["x-usage-prompt-tokens"] == "2"
        assert trailers["x-usage-completion-tokens"] == "16"
        assert trailers["x-usage-reasoning-tokens"] == "0"
        assert trailers["x-timing-prefill-ns"] == "3"
        stream = stub.GenerateStream(pb.GenerateStreamRequest(prompt={"text": "ab"}))
        async for _ in stream:
            pass
        assert dict(await stream.trailing_metadata())["x-usage-cached-tokens"] == "2"


async def test_options_reach_the_engine(served: Stack) -> None:
    params = SamplingParams(
        max_tokens=3,
        temperature=0.0,
        top_k=0,
        seed=5,
        logprobs=1,
        prompt_logprobs=0,
        stop_token_ids=[9],
        ignore_eos=True,
        method="autoregressive",
        method_params={"steps": 3, "threshold": 0.5},
        logit_bias={97: 1.0},
    )
    options = CallOptions(request_id="mine", priority=2, cache_salt="s", return_token_ids=True)
    async with AsyncClient(served.grpc_address) as client:
        answer = await client.generate("abc", params, options)
    assert answer.id == "cmpl-mine"
    assert answer.choices[0].token_ids == [97, 98, 99]
    scored = answer.choices[0].logprobs[0]
    assert (scored.chosen.token, scored.chosen.token_bytes) == ("a", b"a")
    assert scored.chosen.logprob == pytest.approx(-0.97)
    assert [entry.token for entry in scored.top] == ["a"]
    (spec,) = served.engine.submits
    assert spec.sampling.HasField("temperature")
    assert spec.sampling.HasField("top_k")
    assert (spec.sampling.seed, spec.priority, spec.cache_salt) == (5, 2, "s")
    assert spec.stop.ignore_eos
    assert list(spec.stop.token_ids) == [9]
    assert (spec.logprobs.top, spec.logprobs.HasField("prompt_top")) == (1, True)
    assert dict(spec.decoding.params) == {"steps": 3, "threshold": 0.5}
    assert dict(spec.sampling.logit_bias) == {97: 1.0}


async def test_prompt_logprobs_come_with_every_method(served: Stack) -> None:
    params = SamplingParams(max_tokens=4, n=2, prompt_logprobs=1)
    async with AsyncClient(served.grpc_address) as client:
        texts = (await client.generate("éb", params)).prompt_logprobs
        chats = (await client.chat(HI, params)).prompt_logprobs
        assert [entry.chosen.token_id for entry in texts] == [0xA9, ord("b")]
        assert [len(entry.top) for entry in texts] == [1, 1]
        assert len(chats) == 6
        for stream, expected in (
            (client.generate_stream("éb", params), texts),
            (client.chat_stream(HI, params), chats),
        ):
            deltas = [delta async for delta in stream]
            found = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
            assert found == [expected]
            assert deltas[0].prompt_logprobs or deltas[1].prompt_logprobs
        plain = await client.generate("éb", SamplingParams(max_tokens=4))
        assert plain.prompt_logprobs == []


async def test_every_rpc_is_answered_and_empty_requests_are_refused(served: Stack) -> None:
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = rpc.TextServiceStub(channel)
        for method in pb.DESCRIPTOR.services_by_name["TextService"].methods:
            request = getattr(pb, method.input_type.name)()
            call = getattr(stub, method.name)(request)
            served_here = method.name in ("ListModels", "GetModel", "Tokenize", "Detokenize")
            if served_here:
                await call
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if method.server_streaming else call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("fields", "param"), [({"suffix": "x"}, "suffix")])
async def test_unserved_fields_are_named(served: Stack, fields: dict[str, Any], param: str) -> None:
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = rpc.TextServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.TextServiceGenerateRequest(prompt={"text": "a"}, **fields))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert param in caught.value.details()


async def test_unserved_chat_fields(served: Stack) -> None:
    message = {"role": "user", "parts": [{"text": "a"}]}
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = rpc.TextServiceStub(channel)
        forced = {"tools": [{"name": "f"}], "tool_choice": {"mode": "required"}}
        for chat in ({"tools": [{"name": "f"}]}, forced):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Chat(pb.ChatRequest(messages=[message], chat=chat))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        image = {"role": "user", "parts": [{"image_url": "x"}]}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Chat(pb.ChatRequest(messages=[image]))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        captain = {"role": "captain", "parts": [{"text": "a"}]}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Chat(pb.ChatRequest(messages=[captain]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_errors_arrive_typed(served: Stack) -> None:
    async with AsyncClient(served.grpc_address) as client:
        with pytest.raises(Unsupported) as caught:
            await client.chat(HI, options=CallOptions(template={"reasoning_effort": "low"}))
        assert caught.value.param == "reasoning_effort"


async def test_canvas_events(tmp_path: Path) -> None:
    engine = {"mask_token_id": 264, "hold_after": 1}  # newer tokens would overtake the canvas
    async with (
        stack(tmp_path, engine=engine) as served,
        AsyncClient(served.grpc_address) as client,
    ):
        options = CallOptions(emit_canvas=True)
        chosen = SamplingParams(max_tokens=4)
        async for delta in client.generate_stream("ab", chosen, options):
            shown = delta.canvas
            if shown is not None:
                break
    assert (shown.block, shown.step, list(shown.fixed)) == (2, 3, [True, False])
    assert list(shown.confidence) == [0.75, 0.5]
    assert shown.text[1] == "\u2591"


async def test_one_message_has_no_place_for_canvas_events(served: Stack) -> None:
    options = CallOptions(emit_canvas=True)
    async with AsyncClient(served.grpc_address) as client:
        with pytest.raises(InvalidRequest, match="use GenerateStream") as caught:
            await client.generate("ab", SamplingParams(max_tokens=4), options)
        assert caught.value.param == "emit_canvas"
        with pytest.raises(InvalidRequest, match="use ChatStream"):
            await client.chat(HI, SamplingParams(max_tokens=4), options)
    assert not served.engine.submits


async def test_structs_are_nested_as_deeply_as_protobuf_reads(served: Stack) -> None:
    """Which is less than a body may be."""
    message = {"role": "user", "parts": [{"text": "hi"}]}
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = rpc.TextServiceStub(channel)
        for depth, is_read in ((30, True), (40, False), (90, False)):
            kwargs: dict[str, Any] = {}
            for _ in range(depth - 1):
                kwargs = {"a": kwargs}
            request = pb.TokenizeRequest(
                messages={"messages": [message]}, chat_template_kwargs=kwargs
            )
            if is_read:
                assert (await stub.Tokenize(request)).token_ids
                continue
            with pytest.raises(grpc.aio.AioRpcError, match="at most 100 messages") as failed:
                await stub.Tokenize(request)
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
