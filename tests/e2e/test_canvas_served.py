"""A full canvas through the real stack: what is told of its blocks, its cost and its caches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.e2e.real_stack import Faces, Stack, connected, left_idle
from tidemill.v1 import text_pb2

ASKED = {"prompt": "count: 37 n=9 =", "max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
KNOBS = {"block_length": 16, "remasking": "low_confidence", "steps": 12}


def with_knobs(**knobs: Any) -> dict[str, Any]:
    return {**ASKED, "decoding": {"params": {**KNOBS, **knobs}}}


@pytest.fixture
async def faces(stack_of: Callable[[str], Stack]) -> AsyncIterator[Faces]:
    async with left_idle(stack_of("demo-canvas")) as opened:
        yield opened


async def events_of(faces: Faces, **body: Any) -> list[dict[str, Any]]:
    answer = await faces.http.post("/v1/completions", json={**with_knobs(), **body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]


async def test_canvas_events_name_the_block_that_is_decided(faces: Faces) -> None:
    """A reader that is slower than the model gets the newest canvas of some; never an older one."""
    options = {"include_canvas": True, "include_usage": True}
    events = await events_of(faces, stream_options=options)
    told = [event["canvas"] for event in events if "canvas" in event]
    places = [(one["block"], one["step"]) for one in told]
    assert places == sorted(set(places))
    assert {block for block, _ in places} <= {0, 1, 2}
    assert places[-1][0] == 2
    for one in told:
        assert len(one["token_ids"]) <= 48 - 16 * one["block"] + 15


async def test_a_canvas_says_where_it_stands(faces: Faces) -> None:
    """Whatever is fixed is there in the answer of its choice."""
    asked = {"n": 2, "temperature": 0.9, "seed": 4, "return_token_ids": True}
    events = await events_of(faces, **asked, stream_options={"include_canvas": True})
    told = [event["canvas"] for event in events if "canvas" in event]
    answers: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        for choice in event["choices"]:
            answers[choice["index"]] += choice["token_ids"]
    assert {one["index"] for one in told} == {0, 1}
    for one in told:
        places = enumerate(one["token_ids"], one["start"])
        fixed = [place for place, is_fixed in zip(places, one["fixed"], strict=True) if is_fixed]
        assert all(answers[one["index"]][i] == token for i, token in fixed)
    assert max(one["start"] for one in told) > 16


async def test_usage_says_what_a_token_costs(faces: Faces) -> None:
    """12 decisions for 48 tokens, and the same in a stream's last chunk."""
    whole = (await faces.http.post("/v1/completions", json=with_knobs())).json()["usage"]
    details = whole["completion_tokens_details"]
    assert (details["forward_passes"], details["denoise_steps"]) == (12, 12)
    assert details["tokens_per_forward"] == 4.0
    events = await events_of(faces, stream_options={"include_usage": True})
    assert events[-1]["usage"] == whole
    slow = (await faces.http.post("/v1/completions", json=with_knobs(steps=48))).json()
    assert slow["usage"]["completion_tokens_details"]["tokens_per_forward"] == 1.0


async def test_approximate_caches_are_named(faces: Faces) -> None:
    (card,) = (await faces.http.get("/v1/models")).json()["data"]
    assert card["approximate_caches"] == ["prefix", "dual", "sparse"]
    (told,) = (await faces.text.ListModels(text_pb2.ListModelsRequest())).models
    assert list(told.approximate_caches) == card["approximate_caches"]
    for cache in ("none", *card["approximate_caches"]):
        answer = await faces.http.post("/v1/completions", json=with_knobs(cache=cache))
        assert answer.status_code == 200, answer.text


async def test_an_exact_model_has_no_approximate_caches(stack: Stack) -> None:
    async with connected(stack) as opened:
        (card,) = (await opened.http.get("/v1/models")).json()["data"]
        assert card["approximate_caches"] == []
