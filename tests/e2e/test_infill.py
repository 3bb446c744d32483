"""Gaps filled by the built-in block-diffusion model, through the real stack, at every face."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from tests.e2e.real_stack import (
    Faces,
    Stack,
    left_idle,
)
from tests.service.engine_fixtures import pack, rest, unpack
from tidemill.client import AsyncClient, Client
from tidemill.llm import LLM
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.rpc import to_error
from tidemill.sampling_params import SamplingParams
from tidemill.v1 import engine_pb2, text_pb2

GREEDY = {"temperature": 0.0}
# prompt, suffix, what stands between: the gap is as long as that
TASKS = [
    ("count: 37 n=5 =", " 41", " 37 38 39 40"),
    ("reverse: harbour =", "\n", " ruobrah"),
    ("repeat: tide n=3 =", " tide", " tide tide"),
    ("sort: dbca =", "cd", " ab"),
]


@pytest.fixture
def blocks(stack_of: Callable[[str], Stack]) -> Stack:
    return stack_of("demo-block")


@pytest.fixture
async def faces(blocks: Stack) -> AsyncIterator[Faces]:
    async with left_idle(blocks) as opened:
        yield opened


async def completion(faces: Faces, **body: Any) -> dict[str, Any]:
    answer = await faces.http.post("/v1/completions", json={**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def infill(faces: Faces, prefix: str, suffix: str, gap: int) -> text_pb2.InfillResponse:
    options = text_pb2.TextOptions(sampling=GREEDY)
    asked = text_pb2.InfillRequest(prefix=prefix, suffix=suffix, gap_tokens=gap, options=options)
    answer: text_pb2.InfillResponse = await faces.text.Infill(asked)
    return answer


@pytest.mark.parametrize(("prompt", "suffix", "between"), TASKS)
async def test_gaps_are_filled(faces: Faces, prompt: str, suffix: str, between: str) -> None:
    body = {"prompt": prompt, "suffix": suffix, "max_tokens": len(between)}
    once = await completion(faces, **body)
    (choice,) = once["choices"]
    assert (choice["text"], choice["finish_reason"]) == (between, "length")
    assert once["usage"]["completion_tokens"] == len(between)
    assert once["usage"]["prompt_tokens"] == len(prompt)
    filled = await infill(faces, prompt, suffix, len(between))
    assert (filled.text, filled.usage.output_tokens) == (between, len(between))
    streamed = await faces.http.post("/v1/completions", json={**GREEDY, **body, "stream": True})
    assert "".join(re.findall(r'"text":"([^"]*)"', streamed.text)) == between


async def test_the_python_clients_fill_gaps(faces: Faces, blocks: Stack) -> None:
    prompt, suffix, between = TASKS[0]
    params = SamplingParams(temperature=0.0, max_tokens=len(between))
    async with AsyncClient(f"127.0.0.1:{blocks.grpc_port}") as client:
        filling = await client.infill(prompt, suffix, params)
        assert (filling.text, filling.usage.output_tokens) == (between, len(between))
        with pytest.raises(InvalidRequest, match="suffix"):
            await client.infill(prompt, "", params)
    assert (
        await asyncio.to_thread(fill_blocking, f"127.0.0.1:{blocks.grpc_port}", TASKS[1])
        == TASKS[1][2]
    )


def fill_blocking(address: str, task: tuple[str, str, str]) -> str:
    with Client(address) as client:
        params = SamplingParams(temperature=0.0, max_tokens=len(task[2]))
        return client.infill(task[0], task[1], params).text


async def test_offline_and_served_gaps_are_filled_alike(faces: Faces, blocks: Stack) -> None:
    """Also where every token is drawn: the same prompt, pinned tokens and random numbers."""
    params = SamplingParams(temperature=1.2, seed=11, max_tokens=21)
    async with AsyncClient(f"127.0.0.1:{blocks.grpc_port}") as client:
        served = [(await client.infill(before, after, params)).text for before, after, _ in TASKS]
    prefixes, suffixes, _ = zip(*TASKS, strict=True)
    llm = await asyncio.to_thread(LLM, "demo-block", max_model_len=512)
    offline = await asyncio.to_thread(llm.infill, prefixes, suffixes, params, False)
    assert [output.outputs[0].text for output in offline] == served
    assert {output.usage.output_tokens for output in offline} == {21}


async def test_what_stands_behind_a_gap_changes_what_fills_it(faces: Faces) -> None:
    texts = [(await infill(faces, "the ", f"{letter} and", 3)).text for letter in "abcxyz"]
    assert {len(text) for text in texts} == {3}
    assert len(set(texts)) > 3


async def test_an_end_of_text_does_not_cut_a_gap(faces: Faces) -> None:
    """Alone the answer ends after " 3": the gap is longer than it."""
    prompt = "add: 1+2 ="
    alone = await completion(faces, prompt=prompt, max_tokens=12, return_token_ids=True)
    assert alone["choices"][0]["finish_reason"] == "stop"
    assert len(alone["choices"][0]["token_ids"]) < 12
    held = await completion(faces, prompt=prompt, max_tokens=12, suffix="!", return_token_ids=True)
    ids = held["choices"][0]["token_ids"]
    assert len(ids) == 12
    assert not set(ids) & set(alone["choices"][0]["token_ids"][-1:])


def spec(max_tokens: int, pinned: dict[int, int], **fields: Any) -> engine_pb2.GenerateSpec:
    """A prompt of five tokens with pinned ones behind it."""
    asked = engine_pb2.GenerateSpec(
        prompt_token_ids=pack(*b"sort:"), sampling={**GREEDY, "max_tokens": max_tokens}, **fields
    )
    for position, token in pinned.items():
        asked.pinned.add(position=position, token_id=token)
    return asked


async def test_tokens_pinned_anywhere_come_back_in_their_places(faces: Faces) -> None:
    """Over borders of the blocks of 16, two sequences of one call; only others are scored."""
    pinned = {
        position: 97 + position % 7 for position in (5, 6, 14, 15, 16, 20, *range(32, 48), 50)
    }
    asked = spec(60, pinned, logprobs={"top": 0})
    tokens: dict[int, list[int]] = {0: [], 1: []}
    entries: dict[int, list[Any]] = {0: [], 1: []}
    for answer in await rest(faces.engine.Generate(engine_pb2.GenerateRequest(spec=asked, n=2))):
        tokens[answer.index] += unpack(answer.token_ids)
        entries[answer.index] += answer.logprobs
        if answer.HasField("finish"):
            assert answer.finish.usage.output_tokens == len(tokens[answer.index]) - len(pinned)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) > 45
    for position, (token, entry) in enumerate(zip(tokens[0], entries[0], strict=True), 5):
        assert pinned.get(position, token) == token
        assert list(entry.token_ids) == ([] if position in pinned else [token])


BAD = {
    "in the prompt": ({4: 97}, "position 4, inside of the prompt of 5 tokens"),
    "behind the output": ({15: 97}, "position 15, but max_tokens is 10.*at least 11"),
    "no such token": ({6: 272}, r"token id 272; ids of this model are in \[0, 272\)"),
    "nothing left": (dict.fromkeys(range(5, 15), 97), "all 10 positions.*raise max_tokens"),
    "too many": (dict.fromkeys(range(5, 4102), 97), "4097 entries; at most 4096"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_pinned_is_refused(faces: Faces, name: str) -> None:
    pinned, words = BAD[name]
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await rest(faces.engine.Generate(engine_pb2.GenerateRequest(spec=spec(10, pinned))))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert to_error(caught.value).param == "pinned"


async def test_a_position_is_pinned_once(faces: Faces) -> None:
    asked = spec(10, {8: 97})
    asked.pinned.add(position=8, token_id=98)
    with pytest.raises(grpc.aio.AioRpcError, match="position 8 more than once"):
        await rest(faces.engine.Generate(engine_pb2.GenerateRequest(spec=asked)))
