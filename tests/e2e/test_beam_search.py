"""Beam search over the real stack gives what transformers gives on the same checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.e2e.real_stack import ROOT, Faces
from tidemill.v1 import text_pb2 as pb

PROMPTS = ["sort: 9 3 7 1 8 =", "the", "add: 12+30 ="]
MODEL: Path = ROOT / "tidemill" / "builtin" / "demo"


@cache
def model() -> Any:
    loading: Any = pytest.importorskip("transformers").AutoModelForCausalLM
    return loading.from_pretrained(MODEL, dtype=torch.float32).eval()


@cache  # one search answers for all its beams, and for LLM.beam_search as well
def reference(token_ids: tuple[int, ...], width: int, **knobs: Any) -> list[list[int]]:
    """Generated ids without the stop token and what follows it."""
    found = model().generate(
        torch.tensor([token_ids]), num_beams=width, num_return_sequences=width, do_sample=False,
        max_new_tokens=12, **knobs,
    )  # fmt: skip
    ends = model().generation_config.eos_token_id
    ends = {*ends} if isinstance(ends, list) else {ends}
    rows = [row[len(token_ids) :].tolist() for row in found]
    stops = [[i for i, token in enumerate(row) if token in ends] for row in rows]
    return [row[: stop[0]] if stop else row for row, stop in zip(rows, stops, strict=True)]


async def asked(faces: Faces, **body: Any) -> Any:
    answer = await faces.http.post(
        "/v1/completions", json={"max_tokens": 12, "use_beam_search": True, **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("stopping", [False, True])
async def test_completions_are_those_of_transformers(
    faces: Faces, penalty: float, stopping: bool
) -> None:
    knobs = {"length_penalty": penalty, "early_stopping": stopping}
    told = await asked(faces, prompt=PROMPTS, n=3, best_of=4, return_token_ids=True, **knobs)
    assert [choice["index"] for choice in told["choices"]] == list(range(9))
    for number, choice in enumerate(told["choices"]):
        prompt = choice["prompt_token_ids"]
        ids = list(choice["token_ids"])
        if choice["finish_reason"] == "stop":
            ids.pop()
        assert ids == reference(tuple(prompt), 4, **knobs)[number % 3]


async def test_every_face_searches_alike(faces: Faces) -> None:
    text, chat = PROMPTS[0], [{"role": "user", "content": "json: tom 31 rome"}]
    over_http = await asked(faces, prompt=text, n=2, best_of=3, logprobs=2)
    options = {
        "n": 2,
        "beam_search": {"width": 3},
        "sampling": {"max_tokens": 12},
        "logprobs": {"top": 2},
    }
    over_grpc = await faces.text.Generate(
        pb.TextServiceGenerateRequest(prompt={"text": text}, options=options)
    )
    assert [c.text for c in over_grpc.choices] == [c["text"] for c in over_http["choices"]]
    for one, other in zip(over_grpc.choices, over_http["choices"], strict=True):
        told = [entry.chosen.logprob for entry in one.logprobs]
        assert told == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
        assert all(len(top) in (2, 3) for top in other["logprobs"]["top_logprobs"])
    assert over_http["usage"]["completion_tokens"] > 0
    body = {"messages": chat, "use_beam_search": True, "n": 2, "max_tokens": 24}
    answer = (await faces.http.post("/v1/chat/completions", json=body)).json()
    first, second = [choice["message"]["content"] for choice in answer["choices"]]
    assert first != second, "two beams of one search are two answers"


async def test_echoed_prompts_have_the_scores_that_they_have_without_a_search(
    faces: Faces,
) -> None:
    """Of several prompts too, and each token of the answer stands at its place behind them."""
    body = {"prompt": PROMPTS[:2], "echo": True, "logprobs": 1}
    found = await asked(faces, **body, n=2)
    plain = await faces.http.post("/v1/completions", json={**body, "max_tokens": 0})
    for number, choice in enumerate(found["choices"]):
        own = choice["logprobs"]
        prompt = plain.json()["choices"][number // 2]["logprobs"]
        length = len(prompt["tokens"])
        assert own["tokens"][:length] == prompt["tokens"]
        assert own["token_logprobs"][1:length] == pytest.approx(
            prompt["token_logprobs"][1:], abs=1e-3
        )
        assert "".join(own["tokens"]).removesuffix("<|eos|>") == choice["text"]
        assert own["text_offset"][length] == len(PROMPTS[number // 2])


async def test_as_many_alternatives_are_told_as_are_asked_for(faces: Faces) -> None:
    """A search of one beam looks at two of them."""
    found = await asked(faces, prompt=PROMPTS[0], n=1, logprobs=5)
    (choice,) = found["choices"]
    told = choice["logprobs"]["top_logprobs"]
    assert [len(top) for top in told] == [5] * len(told)
    alike = await asked(faces, prompt=PROMPTS[0], n=1)
    assert choice["text"] == alike["choices"][0]["text"], "what is told changes no search"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"n": 16}, "best_of"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"stop": "x"}, "stop"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
async def test_what_a_search_cannot_be(faces: Faces, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": "a", "use_beam_search": True, **fields}
    answer = await faces.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({}, None),
    ],
)
async def test_a_search_is_held_to_no_call(
    faces: Faces, fields: dict[str, Any], param: str | None
) -> None:
    """A call that is forced is a grammar; one that is merely offered is not."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "use_beam_search": True,
        "max_tokens": 4,
        **fields,
    }
    answer = await faces.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == (200 if param is None else 400), answer.text
    assert param is None or answer.json()["error"]["param"] == param


async def test_a_stream_over_grpc_is_refused(faces: Faces) -> None:
    request = pb.GenerateStreamRequest(prompt={"text": "a"}, options={"beam_search": {"width": 2}})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await faces.text.GenerateStream(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
