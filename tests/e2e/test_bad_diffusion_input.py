"""Wrong knobs of diffusion at every face of the real stack: a clear status, the knob by name with
its range, and a good request behind it on the same connections.

One line of a table is one case. Other wrong values are in test_bad_input.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import grpc
import pytest

from tests.e2e.real_stack import (
    Faces,
    Stack,
    connected,
    good,
    settled,
    until_idle,
)
from tests.e2e.test_bad_input import check_http
from tests.service.engine_fixtures import rest, spec
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2, text_pb2

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
LIMIT = 2048
SPARSE = {"cache": "sparse"}
UNKNOWN = "Unknown decoding parameter '{}' of block_diffusion; it knows: .*threshold"

# name: (knobs of a request for 24 tokens, the wrong one, words of the message)
CANVAS: dict[str, tuple[dict[str, Any], str, str]] = {
    "steps do not divide": ({"block_length": 8, "steps": 7}, "steps", "multiple of the 3.*3 to 24"),
    "more steps than masks": ({"block_length": 8, "steps": 27}, "steps", "is 27;.* from 3 to 24"),
    "no steps": ({"steps": 0}, "steps", r"is 0; .* whole number in \[1, max_tokens\]"),
    "no block": ({"block_length": 0}, "block_length", r"is 0; .*number in \[1, max_tokens\]"),
    "block -8": ({"block_length": -8}, "block_length", r"is -8.*; .*number in \[1, max_tokens\]"),
    "half a block": ({"block_length": 2.5}, "block_length", r"is 2\.5; it must be a whole number"),
    "block too long": ({"block_length": 25}, "block_length", "is 25;.* at most.* max_tokens 24"),
    "threshold -1": ({"threshold": -1}, "threshold", "is -1.*; .*finite number of at least 0"),
    "threshold hot": ({"threshold": "hot"}, "threshold", "is 'hot'; .*number of at least 0"),
    "no such cache": ({"cache": "sparsest"}, "cache", "one of none, prefix, dual, sparse"),
    "ratio 0": ({**SPARSE, "retention_ratio": 0}, "retention_ratio", "above 0 and at most 1"),
    "ratio 1.5": ({**SPARSE, "retention_ratio": 1.5}, "retention_ratio", r"is 1\.5;.* in \[0, 1\]"),
    "ratio unread": ({"retention_ratio": 0.5}, "retention_ratio", "left out with cache none"),
    "even pool": ({**SPARSE, "pool_kernel": 2}, "pool_kernel", "is 2; it must be odd"),
    "delay -1": ({**SPARSE, "delay_step": -1}, "delay_step", r"is -1.*; .*whole number in \[0, "),
    "refresh unread": ({"refresh_interval": 2}, "refresh_interval", "left out with cache none"),
    "guidance -1": ({"cfg_scale": -1}, "cfg_scale", r"is -1.*;.* in \[0, 1e\+06\]"),
    "not known": ({"bogus": 1}, "bogus", "Unknown decoding parameter 'bogus' of full_canvas"),
}  # fmt: skip
BLOCK: dict[str, tuple[dict[str, Any], str, str]] = {
    "no steps": ({"steps": 0}, "steps", r"is 0; it must be a whole number in \[1, 16\]"),
    "more steps than masks": ({"steps": 17}, "steps", r"is 17; .*in \[1, 16\]"),
    "half a step": ({"steps": 2.5}, "steps", r"is 2\.5; .*whole number in \[1, 16\]"),
    "threshold -1": ({"threshold": -1}, "threshold", "is -1.*; .*finite number of at least 0"),
    "another rule's": ({"factor": 1}, "factor", "not read by remasking 'threshold'"),
    "no such rule": ({"remasking": "best"}, "remasking", "is 'best'; it must be one of threshold"),
    "block_length": ({"block_length": 8}, "block_length", UNKNOWN.format("block_length")),
    "dual": ({"cache": "dual"}, "cache", UNKNOWN.format("cache")),
    "sparse": ({**SPARSE, "retention_ratio": 0.5}, "cache", UNKNOWN.format("cache")),
    "ratio": ({"retention_ratio": 0.5}, "retention_ratio", UNKNOWN.format("retention_ratio")),
    "guidance": ({"cfg_scale": 1}, "cfg_scale", UNKNOWN.format("cfg_scale")),
}  # fmt: skip
MODELS = {"demo-canvas": CANVAS, "demo-block": BLOCK}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NO_GRAMMARS = r"'full_canvas' does not support grammars \({}\); leave it out"


class Served(NamedTuple):
    model: str
    faces: Faces


@pytest.fixture
async def served(
    stack_of: Callable[[str], Stack], request: pytest.FixtureRequest
) -> AsyncIterator[Served]:
    """Checks after the test that all connections still serve and that nothing is left over."""
    stack = stack_of(request.param)
    async with settled(stack), connected(stack) as opened:
        yield Served(request.param, opened)
        await good(opened)
        await until_idle(opened)


async def check_text(
    faces: Faces, fields: dict[str, Any], code: grpc.StatusCode, param: str, words: str
) -> None:
    """Generate and GenerateStream refuse with this status, naming the parameter."""
    kinds = (text_pb2.TextServiceGenerateRequest, text_pb2.GenerateStreamRequest)
    once, stream = (kind(**{"prompt": {"text": "a"}, **fields}) for kind in kinds)
    for call in (faces.text.Generate(once), rest(faces.text.GenerateStream(stream))):
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await call
        assert (caught.value.code(), to_error(caught.value).param) == (code, param)


async def check_completions(faces: Faces, body: dict[str, Any], param: str, words: str) -> None:
    """Streamed or not, with a good request behind it."""
    for stream in (False, True):
        asked = {"prompt": "a", "max_tokens": 24, **body, "stream": stream}
        answer = await faces.http.post("/v1/completions", json=asked)
        assert check_http(answer, 400, words)["param"] == param
        after = await faces.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert after.status_code == 200, after.text


async def check_engine(
    faces: Faces, asked: engine_pb2.GenerateSpec, param: str, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await rest(faces.engine.Generate(engine_pb2.GenerateRequest(spec=asked)))
    assert (caught.value.code(), to_error(caught.value).param) == (INVALID, param)


CASES = [(model, name) for model, table in MODELS.items() for name in table]


@pytest.mark.parametrize(("served", "name"), CASES, indirect=["served"])
async def test_knobs(served: Served, name: str) -> None:
    faces = served.faces
    knobs, knob, words = MODELS[served.model][name]
    param, decoding = f"decoding.params.{knob}", {"params": knobs}
    await check_completions(faces, {"decoding": decoding}, param, words)
    options = {"sampling": {"max_tokens": 24}, "decoding": decoding}
    await check_text(faces, {"options": options}, INVALID, param, words)
    asked = spec(5, max_tokens=24)
    asked.decoding.params.update(knobs)
    await check_engine(faces, asked, param, words)


@pytest.mark.parametrize("served", MODELS, indirect=True)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
async def test_thresholds_that_are_no_numbers(served: Served, value: float) -> None:
    """JSON has none of them, protobuf has all."""
    asked = spec(5, max_tokens=24)
    asked.decoding.params.update({"threshold": value})
    words = "threshold is .*; it must be a finite number of at least 0"
    await check_engine(served.faces, asked, "decoding.params.threshold", words)


@pytest.mark.parametrize("served", MODELS, indirect=True)
async def test_prompts_that_fill_the_context(served: Served) -> None:
    """The last one that fits is answered by one token; canvases too hold what follows."""
    faces = served.faces
    full = {"prompt": "a" * LIMIT, "max_tokens": None}
    words = "context length is 2048 tokens.*resulted in 2048 tokens"
    await check_completions(faces, full, "prompt", words)
    text = {"prompt": {"text": "a" * LIMIT}}
    await check_text(faces, text, INVALID, "prompt", words)
    await check_completions(faces, {"prompt": "a" * 2030}, "prompt", r"2054 tokens \(2030 in the")
    last = {"prompt": "a" * (LIMIT - 1), "temperature": 0, "ignore_eos": True}
    answer = await faces.http.post("/v1/completions", json=last)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("served", ["demo-canvas"], indirect=True)
async def test_grammars_of_a_canvas(served: Served) -> None:
    faces = served.faces
    await check_completions(
        faces, {"guided_json": SCHEMA}, "guided_json", NO_GRAMMARS.format("guided_json")
    )
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": named}
    answer = await faces.http.post("/v1/chat/completions", json=body)
    error = check_http(answer, 400, NO_GRAMMARS.format("response_format"))
    assert (error["param"], error["code"]) == ("response_format", "unsupported")
    constraint = {"json_schema": json.dumps(SCHEMA)}
    text = {"options": {"constraint": constraint}}
    param = "constraint.json_schema"
    await check_text(faces, text, UNIMPLEMENTED, param, NO_GRAMMARS.format(param))


RIGHT = {"demo-canvas": {"block_length": 8, "steps": 6}, "demo-block": {"steps": 16}}


@pytest.mark.parametrize("served", MODELS, indirect=True)
async def test_control_right_knobs_are_not_refused(served: Served) -> None:
    """Neighbours of the wrong ones: the checks above fail for them."""
    asked = {"decoding": {"params": RIGHT[served.model]}, "temperature": 0}
    with pytest.raises(AssertionError, match='"choices"'):
        await check_completions(served.faces, asked, "decoding.params.steps", "steps")
    sparse = {**SPARSE, "retention_ratio": 0.5, "pool_kernel": 3, "delay_step": 0}
    body = {"prompt": "add: 1+2 =", "max_tokens": 24, "decoding": {"params": sparse}}
    answer = await served.faces.http.post("/v1/completions", json=body)
    assert answer.status_code == (200 if served.model == "demo-canvas" else 400), answer.text
