"""Wrong values at every face of the real stack: a clear status, words that help, nothing left over.

One line of a table is one case. Wrong moments (clients that leave, engines that die) are in
test_bad_moments.py, starts that cannot work in test_bad_starts.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

import grpc
import httpx
import openai
import pytest

from tests.e2e.real_stack import Faces, Stack
from tests.service.engine_fixtures import rest, spec
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2, text_pb2

LONG, LIMIT, VOCAB = "a" * 3000, 2048, 272
MANY = 6 << 20
KNOB = {"params": {"bogus": 1}}
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND

# name: (body, status, param, words of the message)
HTTP: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "empty prompt": ({"prompt": ""}, 400, "prompt", "prompt is empty.*at least one token"),
    "no tokens": ({"prompt": []}, 400, "prompt", "prompt is empty.*at least one token"),
    "no prompt": ({}, 400, "prompt", "prompt: Field required"),
    "one empty of two": ({"prompt": ["a", ""]}, 400, "prompt", "prompt is empty"),
    "prompt too long": ({"prompt": LONG}, 400, "prompt", "context length is 2048 .*reduce the"),
    "no room": ({"prompt": "ab", "max_tokens": 2048}, 400, "prompt", r"2050 tokens \(2 in the pro"),
    "id too large": ({"prompt": [5, 272]}, 400, "prompt", r"token id 272;.* in \[0, 272\)"),
    "id huge": ({"prompt": [2**40]}, 400, "prompt", r"token id 1099511627776;.* in \[0, 272\)"),
    "id negative": ({"prompt": [-1]}, 400, "prompt", r"token id -1;.* in \[0, 272\)"),
    "temperature -1": ({"temperature": -1}, 400, "temperature", r"-1.*0 \(greedy\) or at least"),
    "top_p 0": ({"top_p": 0}, 400, "top_p", r"top_p is 0.*in \(0, 1\]"),
    "n 0": ({"n": 0}, 400, "n", r"n is 0; it must lie in 1\.\.16"),
    "n 99": ({"n": 99}, 400, "n", r"n is 99; it must lie in 1\.\.16"),
    "max_tokens -3": ({"max_tokens": -3}, 400, "max_tokens", "is -3; it must be at least 1"),
    "max_tokens 0": ({"max_tokens": 0}, 400, "max_tokens", "is 0; .*at least 1 .*set echo to true"),
    "unknown model": ({"model": "gpt-9"}, 404, "model", "'gpt-9' does not exist.*serves 'demo'"),
    "unknown knob": ({"decoding": KNOB}, 400, "decoding.params.bogus", "'bogus' of autoregressive"),
    "unknown method": ({"decoding": {"method": "up"}}, 400, "decoding.method", "'up'.*autoregress"),
    "not a number": ({"temperature": "hot"}, 400, "temperature", "valid number.*'hot'"),
    "not a whole number": ({"n": 1.5}, 400, "n", r"valid integer.*1\.5"),
    "more than 64 bits": ({"seed": 2**64}, 400, "seed", r"at most 64 bits \(got 1\.8"),
    "prompt of a wrong type": ({"prompt": {"a": 1}}, 400, "prompt", "must be a string, a list of"),
    "stop of a wrong type": ({"stop": 5}, 400, "stop", "valid string.*got 5"),
    "logprobs 99": ({"logprobs": 99}, 400, "logprobs", r"logprobs is 99; it must lie in 0\.\.20"),
    "logit_bias": ({"logit_bias": {"999": 1}}, 400, "logit_bias", "token id 999;.* in"),
    "unserved": ({"typical_p": 0.5}, 400, "typical_p", "is not served.*leave it out"),
    "bad_words": ({"bad_words": [""]}, 400, "bad_words", "0 characters; it must have 1 to"),
    "allowed ids": ({"allowed_token_ids": [999]}, 400, "allowed_token_ids", "token id 999;.* in"),
    "no such ids": ({"allowed_token_ids": [-1]}, 400, "allowed_token_ids", "token id -1;.* in"),
    "wide ids": ({"allowed_token_ids": [2**40]}, 400, "allowed_token_ids", r"id 1099511627776"),
    "no ids": ({"allowed_token_ids": []}, 400, "allowed_token_ids", "at least 1"),
    "no schema": ({"guided_json": {"type": "x"}}, 400, "guided_json", "not compile: Invalid type"),
    "no gaps": ({"suffix": "b"}, 400, "suffix", "needs a diffusion model.*leave it out"),
    "other method's knob": ({"threshold": 0.5}, 400, "threshold", "'threshold'"),
}  # fmt: skip

# name: (content, status, code, words)
HTTP_BYTES: dict[str, tuple[bytes, int, str, str]] = {
    "nothing": (b"", 400, "invalid_json", "not valid JSON"),
    "half a body": (b'{"prompt": "a', 400, "invalid_json", "not valid JSON"),
    "a list": (b"[1]", 400, "invalid_json", "must be a JSON object, not list"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400, "invalid_json", "JSON in UTF-8"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json", "not valid JSON"),
    "half a character": (b'{"prompt": "\\ud800"}', 400, "invalid_json", "JSON in UTF-8.*surrogate"),
    "6 MB": (b'{"prompt": "' + b"a" * MANY + b'"}', 413, "body_too_large", "4194304 bytes; send l"),
}  # fmt: skip


def options(**fields: Any) -> dict[str, Any]:
    return {"prompt": {"text": "a"}, "options": fields}


def sampling(**fields: Any) -> dict[str, Any]:
    return options(sampling=fields)


# name: (fields of a TextService request, status, param, words)
TEXT: dict[str, tuple[dict[str, Any], grpc.StatusCode, str, str]] = {
    "no prompt": ({}, INVALID, "prompt", "prompt is empty.*at least one token"),
    "empty prompt": ({"prompt": {"text": ""}}, INVALID, "prompt", "prompt is empty"),
    "no tokens": ({"prompt": {"tokens": {}}}, INVALID, "prompt", "prompt is empty"),
    "prompt too long": ({"prompt": {"text": LONG}}, INVALID, "prompt", "context length is 2048"),
    "6 MB": ({"prompt": {"text": "a" * MANY}}, INVALID, "prompt", "2048 tokens.*Please reduce"),
    "id": ({"prompt": {"tokens": {"token_ids": [272]}}}, INVALID, "prompt", r"272;.*\[0, 272\)"),
    "temperature -1": (sampling(temperature=-1), INVALID, "temperature", r"-1.*0 \(greedy\) or"),
    "temperature NaN": (sampling(temperature=math.nan), INVALID, "temperature", "nan.*finite"),
    "top_p 0": (sampling(top_p=0), INVALID, "top_p", r"top_p is 0.*in \(0, 1\]"),
    "n 0": (options(n=0), INVALID, "n", r"n is 0; it must lie in 1\.\.16"),
    "max_tokens -3": (sampling(max_tokens=-3), INVALID, "max_tokens", "is -3;.*at least 1"),
    "max_tokens 0": (sampling(max_tokens=0), INVALID, "max_tokens", "is 0;.*set echo to true"),
    "unknown model": (options(model="gpt-9"), NOT_FOUND, "model", "'gpt-9'.*serves 'demo'"),
    "unknown knob": (options(decoding=KNOB), INVALID, "decoding.params.bogus", "'bogus' of autor"),
    "no gaps": ({"suffix": "b"}, grpc.StatusCode.UNIMPLEMENTED, "suffix", "a diffusion model.*out"),
}  # fmt: skip

# What no typed client can send. name: (bytes, words)
BYTES: dict[str, tuple[bytes, str]] = {
    "malformed": (b"\xff\xff\xff", "malformed message.*same contract"),
    "cut off": (b"\x0a\x20\x0a", "malformed message.*same contract"),
    "invalid UTF-8": (b"\x0a\x04\x0a\x02\xff\xfe", "malformed message.*UTF-8"),
    "wrong type": (b"\x08\x05", "empty"),  # another wire type is an unknown field: no prompt
}

# name: (bytes on a Session, status, words)
FRAMES: dict[str, tuple[bytes, grpc.StatusCode, str]] = {
    "malformed": (b"\xff\xff\xff", INVALID, "malformed message.*same contract"),
    "behind a request": (b"\xff\xff\xff", INVALID, "malformed message.*same contract"),
    "invalid UTF-8": (b"\x0a\x04\x2a\x02\xff\xfe", INVALID, "malformed message.*same contract"),
    "wrong type": (b"\x08\x05", grpc.StatusCode.FAILED_PRECONDITION, "first frame.*Hello"),
}


def wrong(*prompt: int, **fields: Any) -> engine_pb2.GenerateSpec:
    made = spec(*(prompt or (5,)), max_tokens=fields.pop("max_tokens", 5))
    knobs = fields.pop("knobs", None)
    for name, value in fields.items():
        setattr(made.sampling, name, value)
    made.decoding.params.update(knobs or {})
    return made


# name: (spec, param, words)
ENGINE: dict[str, tuple[engine_pb2.GenerateSpec, str, str]] = {
    "empty prompt": (spec(), "prompt_token_ids", "prompt is empty.*at least one token"),
    "half an id": (engine_pb2.GenerateSpec(prompt_token_ids=b"abc"), "prompt_token_ids", "uint32"),
    "prompt too long": (wrong(*[5] * 3000), "prompt_token_ids", "context length is 2048 tokens"),
    "6 MB": (wrong(*[5] * (MANY // 4)), "prompt_token_ids", "context length is 2048.*reduce"),
    "id": (wrong(272), "prompt_token_ids", r"token id 272;.*\[0, 272\)"),
    "temperature -1": (wrong(temperature=-1), "temperature", r"-1.*0 \(greedy\) or at least"),
    "temperature NaN": (wrong(temperature=math.nan), "temperature", "nan.*finite"),
    "top_p 0": (wrong(top_p=0), "top_p", r"top_p is 0.*\(0, 1\]"),
    "max_tokens -3": (wrong(max_tokens=-3), "max_tokens", "max_tokens is -3.*at least 1"),
    "max_tokens 0": (wrong(max_tokens=0), "max_tokens", "max_tokens is 0.*at least 1"),
    "unknown knob": (wrong(knobs={"bogus": 1}), "decoding.params.bogus", "'bogus' of autoregressi"),
}  # fmt: skip


def check_http(answer: httpx.Response, status: int, words: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert error["type"] == kind
    assert re.search(words, error["message"]), error
    return dict(error)


@pytest.mark.parametrize("name", HTTP)
async def test_http(faces: Faces, name: str) -> None:
    body, status, param, words = HTTP[name]
    if name != "no prompt":
        body = {"prompt": "a", **body}
    for stream in (False, True):
        answer = await faces.http.post("/v1/completions", json={**body, "stream": stream})
        assert check_http(answer, status, words)["param"] == param
        after = await faces.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert after.status_code == 200
        assert socket_of(after) == socket_of(answer)


def socket_of(answer: httpx.Response) -> Any:
    return answer.extensions["network_stream"].get_extra_info("client_addr")


@pytest.mark.parametrize("name", HTTP_BYTES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_http_bytes(faces: Faces, name: str, path: str) -> None:
    content, status, code, words = HTTP_BYTES[name]
    answer = await faces.http.post(path, content=content)
    assert check_http(answer, status, words)["code"] == code


async def test_a_chats_alternatives_have_its_own_name(faces: Faces) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 25}
    answer = await faces.http.post("/v1/chat/completions", json=body)
    words = r"top_logprobs is 25; it must lie in 0\.\.20"
    assert check_http(answer, 400, words)["param"] == "top_logprobs"


async def test_context_overflow_in_the_words_of_openai(faces: Faces, stack: Stack) -> None:
    """Clients look for the code, or for these words."""
    reduce = "Please reduce the length of the messages"
    chat = [{"role": "user", "content": LONG}]
    asked = [{"role": "user", "content": "hello"}]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as sdk:
        for messages, more, words in (
            (chat, {}, rf"your messages resulted in \d+ tokens\. {reduce}\."),
            (asked, {"max_tokens": 2048}, rf"in the messages, 2048 in the completion\)\. {reduce}"),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                await sdk.chat.completions.create(model="demo", messages=messages, **more)
            error = caught.value.body
            assert isinstance(error, dict)
            head = "This model's maximum context length is 2048 tokens. However, "
            assert error["message"].startswith(head)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
            assert error["n_ctx"] == LIMIT


@pytest.mark.parametrize("name", TEXT)
async def test_text_service(faces: Faces, name: str) -> None:
    fields, code, param, words = TEXT[name]
    if name not in ("no prompt",):
        fields = {"prompt": {"text": "a"}, **fields}
    once = text_pb2.TextServiceGenerateRequest(**fields)
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await faces.text.Generate(once)
    assert (caught.value.code(), to_error(caught.value).param) == (code, param)
    stream = text_pb2.GenerateStreamRequest(**fields)
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await rest(faces.text.GenerateStream(stream))
    assert (caught.value.code(), to_error(caught.value).param) == (code, param)


@pytest.mark.parametrize("name", ENGINE)
async def test_engine_service(faces: Faces, name: str) -> None:
    """A refused Submit ends its own handle only; a refused Generate has the same words."""
    asked, param, words = ENGINE[name]
    await faces.session.submit(1, 5, max_tokens=40)
    await faces.session.send(submit=engine_pb2.Submit(handle=2, spec=asked))
    await faces.session.drain(1, 2)
    (failed,), (finish,) = faces.session.ends[2], faces.session.ends[1]
    assert (failed.code, failed.param) == (INVALID.value[0], param)
    assert len(faces.session.tokens[1]) == 40 or finish.reason == 1
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await rest(faces.engine.Generate(engine_pb2.GenerateRequest(spec=asked)))
    assert caught.value.code() is INVALID
    assert (caught.value.details(), to_error(caught.value).param) == (failed.message, param)


async def test_engine_service_n_0(faces: Faces) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"n is 0; it must lie in 1\.\.128") as caught:
        await rest(faces.engine.Generate(engine_pb2.GenerateRequest(spec=spec(5), n=0)))
    assert caught.value.code() is INVALID


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("face", ["Generate", "GenerateStream", "engine"])
async def test_bytes_that_are_no_message(faces: Faces, name: str, face: str) -> None:
    content, words = BYTES[name]
    if face == "engine":
        call = faces.engine_channel.unary_stream("/tidemill.v1.EngineService/Generate")(content)
    elif face == "GenerateStream":
        path = "/tidemill.v1.TextService/GenerateStream"
        call = faces.text_channel.unary_stream(path)(content)
    else:
        call = faces.text_channel.unary_unary("/tidemill.v1.TextService/Generate")(content)
    assert await call.code() is INVALID
    assert re.search(words, await call.details())


@pytest.mark.parametrize("name", FRAMES)
async def test_bytes_that_are_no_frame(faces: Faces, name: str) -> None:
    """They end their own session, and what runs in it; other sessions go on."""
    content, code, words = FRAMES[name]
    call = faces.engine_channel.stream_stream("/tidemill.v1.EngineService/Session")()
    if name == "behind a request":
        await call.write(message(hello={"protocol_major": 1}))
        await call.write(message(submit={"handle": 1, "spec": spec(5, max_tokens=2000)}))
        await call.read()
    await call.write(content)
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await rest(call)  # no status without it: what the request has said comes first
    assert caught.value.code() is code


def message(**frame: Any) -> bytes:
    return engine_pb2.SessionRequest(**frame).SerializeToString()


def test_the_tables_have_every_row_of_the_issue() -> None:
    """A negative control for the tables: a dropped row is seen."""
    for table in (HTTP.keys() | HTTP_BYTES.keys(), TEXT.keys() | BYTES.keys()):
        wanted = {"empty prompt", "prompt too long", "temperature -1", "top_p 0", "n 0", "6 MB"}
        wanted |= {"max_tokens -3", "max_tokens 0", "unknown model", "unknown knob"}
        assert wanted | {"invalid UTF-8"} <= table
