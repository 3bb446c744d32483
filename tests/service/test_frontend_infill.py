"""A gap before a suffix, at both faces of a real frontend; the engine is a fake that echoes."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.service.frontends import Stack, stack
from tests.waiting import until
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

MASK = 264
ASKED = {"prompt": "abc", "suffix": "<é>", "max_tokens": 7}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path, engine={"mask_token_id": MASK, "tokens_per_step": 3}) as running:
        yield running
        await until(lambda: running.engine.live == running.frontend.desk.fleet.num_slots == 0)


@pytest.fixture
async def http(served: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with served.http() as client:
        yield client


@pytest.fixture
async def text(served: Stack) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        yield rpc.TextServiceStub(channel)


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def pinned(spec: engine_pb2.GenerateSpec) -> dict[int, int]:
    return {one.position: one.token_id for one in spec.pinned}


async def test_the_engine_gets_a_gap_and_what_is_behind_it(
    served: Stack, http: httpx.AsyncClient
) -> None:
    answer = await complete(http)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcabca", "length")
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["prompt_tokens"] == 3
    (spec,) = served.engine.submits
    assert spec.sampling.max_tokens == 7 + 4
    assert pinned(spec) == dict(enumerate(b"<\xc3\xa9>", 10))
    await complete(http, suffix="")
    assert not served.engine.submits[-1].pinned
    assert served.engine.submits[-1].sampling.max_tokens == 7


async def test_streams_end_where_the_gap_ends(http: httpx.AsyncClient) -> None:
    body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    lines = (await http.post("/v1/completions", json=body)).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "abcabca"
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 7


async def test_every_prompt_and_choice_gets_the_suffix(
    served: Stack, http: httpx.AsyncClient
) -> None:
    answer = await complete(http, prompt=["ab", "xyz"], n=2, max_tokens=4, logprobs=0)
    assert [c["text"] for c in answer["choices"]] == ["abab"] * 2 + ["xyzx"] * 2
    assert [min(pinned(spec)) for spec in served.engine.submits] == [6, 6, 7, 7]
    assert [len(c["logprobs"]["tokens"]) for c in answer["choices"]] == [4] * 4
    assert answer["usage"]["completion_tokens"] == 16


async def test_what_goes_with_a_suffix(served: Stack, http: httpx.AsyncClient) -> None:
    assert (await complete(http, echo=True))["choices"][0]["text"] == "abcabcabca"
    (stopped,) = (await complete(http, stop="ca"))["choices"]
    assert (stopped["text"], stopped["stop_reason"]) == ("ab", "ca")
    cut = await complete(http, prompt="a" * 600, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 512 - 11
    assert min(pinned(served.engine.submits[-1])) == 508
    unsaid = await complete(http, max_tokens=None)
    assert unsaid["usage"]["completion_tokens"] == 16


BAD = {
    "no room": ({"max_tokens": 506}, "prompt", r"3 in the prompt, 506 in the gap, 4 in the suffix"),
    "huge": ({"suffix": "b" * 100_000}, "suffix", "tokens or more; it may have 4096"),
    "too long": ({"suffix": "b" * 5000}, "suffix", "5000 tokens or more; it may have 4096"),
    "no gap": ({"max_tokens": 0, "echo": True}, "max_tokens", "max_tokens is 0.*suffix"),
    "too short": ({"min_tokens": 9}, "min_tokens", r"min_tokens is 9; .* in \[0, 7\], the length"),
    "not a text": ({"suffix": 5}, "suffix", "valid string"),
    "method": ({"decoding": {"method": "autoregressive"}}, "suffix", "'autoregressive' does not"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input(http: httpx.AsyncClient, name: str) -> None:
    fields, param, words = BAD[name]
    answer = await http.post("/v1/completions", json={**ASKED, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert re.search(words, error["message"]), error
    assert (await complete(http))["choices"][0]["text"] == "abcabca"


async def test_chats_have_no_suffix(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "suffix": "b"}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "use /v1/completions" in answer.json()["error"]["message"]


async def test_text_service(served: Stack, text: Any) -> None:
    options = {"sampling": {"max_tokens": 7}}
    fields = {"prompt": {"text": "abc"}, "suffix": "<é>", "options": options}
    once = await text.Generate(pb.TextServiceGenerateRequest(**fields))
    pieces = [m async for m in text.GenerateStream(pb.GenerateStreamRequest(**fields))]
    filled = await text.Infill(pb.InfillRequest(prefix="abc", suffix="<é>", gap_tokens=7))
    texts = [once.choices[0].text, "".join(m.choice.text for m in pieces), filled.text]
    assert texts == ["abcabca"] * 3
    assert filled.id.startswith("infill-")
    assert [m.usage.output_tokens for m in (once, pieces[-1], filled)] == [7, 7, 7]
    first, *others = [spec.SerializeToString() for spec in map(nameless, served.engine.submits)]
    assert others == [first, first]


def nameless(spec: engine_pb2.GenerateSpec) -> engine_pb2.GenerateSpec:
    for name in ("request_id", "group", "traceparent", "tracestate"):
        spec.ClearField(name)
    return spec


INFILL: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prefix": ({"prefix": ""}, "prefix", "prefix is empty"),
    "no suffix": ({"suffix": ""}, "suffix", "suffix is empty.*use Generate"),
    "no gap": ({"gap_tokens": 0}, "gap_tokens", "gap_tokens is 0"),
    "huge gap": ({"gap_tokens": 2**32 - 1}, "gap_tokens", "gap_tokens is 4294967295"),
    "no room": ({"gap_tokens": 600}, "prefix", "600 in the gap, 1 in the suffix"),
    "too short": ({"options": {"sampling": {"min_tokens": 8}}}, "min_tokens", r"in \[0, 7\]"),
    "max_tokens": ({"options": {"sampling": {"max_tokens": 3}}}, "max_tokens", "use gap_tokens"),
    "n": ({"options": {"n": 2}}, "n", "use Generate"),
    "logprobs": ({"options": {"logprobs": {"top": 1}}}, "logprobs.top", "use Generate"),
    "ids": ({"options": {"return_token_ids": True}}, "return_token_ids", "use Generate"),
}


@pytest.mark.parametrize("name", INFILL)
async def test_bad_infills(text: Any, name: str) -> None:
    fields, param, words = INFILL[name]
    good = {"prefix": "abc", "suffix": "d", "gap_tokens": 7}
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await text.Infill(pb.InfillRequest(**{**good, **fields}))
    unserved = name in ("max_tokens", "n", "logprobs", "ids")
    code = grpc.StatusCode.UNIMPLEMENTED if unserved else grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.code(), to_error(caught.value).param) == (code, param)


async def test_a_model_that_only_appends_says_so(tmp_path: Path) -> None:
    async with (
        stack(tmp_path) as served,
        served.http() as http,
        grpc.aio.insecure_channel(served.grpc_address) as channel,
    ):
        answer = await http.post("/v1/completions", json=ASKED)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "suffix"
        assert "needs a diffusion model" in answer.json()["error"]["message"]
        request = pb.InfillRequest(prefix="a", suffix="b", gap_tokens=3)
        with pytest.raises(grpc.aio.AioRpcError, match="needs a diffusion model") as caught:
            await rpc.TextServiceStub(channel).Infill(request)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert served.engine.submits == []
