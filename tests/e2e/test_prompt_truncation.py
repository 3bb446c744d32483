"""Prompts that are cut to a number of tokens, the same through every door."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.real_stack import HOST, Faces, Stack
from tidemill.client import AsyncClient
from tidemill.exchange import CallOptions
from tidemill.llm import LLM
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import SamplingParams

TEXT = "the sea is calm tonight, the tide is full"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", max_model_len=64)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **fields})


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [1, 5, 1000])
async def test_every_door_cuts_alike(
    faces: Faces, stack: Stack, llm: LLM, side: str, keep: int
) -> None:
    whole = llm.generate(TEXT, params(), use_tqdm=False)[0].prompt_token_ids
    expected = whole[-keep:] if side == "left" else whole[:keep]
    fields = {"truncate_prompt_tokens": keep, "truncation_side": side}
    (offline,) = llm.generate(TEXT, params(**fields), use_tqdm=False)
    assert offline.prompt_token_ids == expected
    (by_ids,) = llm.generate(expected, params(), use_tqdm=False)
    assert offline.outputs[0].token_ids == by_ids.outputs[0].token_ids
    options = CallOptions(return_token_ids=True)
    async with AsyncClient(f"{HOST}:{stack.grpc_port}") as client:
        answer = await client.generate(TEXT, params(**fields), options)
        stream = [one async for one in client.generate_stream(TEXT, params(**fields), options)]
    assert answer.prompt_token_ids == stream[0].prompt_token_ids == expected
    assert not any(one.prompt_token_ids for one in stream[1:])
    assert answer.choices[0].token_ids == by_ids.outputs[0].token_ids
    body = {"prompt": TEXT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
    (choice,) = (await faces.http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["prompt_token_ids"] == expected
    assert choice["token_ids"] == by_ids.outputs[0].token_ids


def test_what_the_context_leaves_is_kept(llm: LLM) -> None:
    ids = [5 + i % 50 for i in range(200)]
    with pytest.raises(InvalidRequest):
        llm.generate(ids, params(), use_tqdm=False)
    (output,) = llm.generate(ids, params(truncate_prompt_tokens=-1), use_tqdm=False)
    assert output.prompt_token_ids == ids[-60:]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "up"}, "truncation_side"),
        ({"truncation_side": "right"}, "truncation_side"),
    ],
)
async def test_wrong_values_are_named(
    faces: Faces, stack: Stack, llm: LLM, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as offline:
        llm.generate(TEXT, params(**fields), use_tqdm=False)
    async with AsyncClient(f"{HOST}:{stack.grpc_port}") as client:
        with pytest.raises(InvalidRequest) as served:
            await client.generate(TEXT, params(**fields))
    assert offline.value.param == served.value.param == param
    assert offline.value.message == served.value.message
