"""`LLM.beam_search` and the clients' beams give what transformers gives on the same checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.real_stack import HOST, Faces, Stack
from tests.e2e.test_beam_search import MODEL, PROMPTS, reference
from tidemill.client import AsyncClient
from tidemill.exchange import CallOptions
from tidemill.llm import LLM
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.sampling_params import BeamSearchParams, SamplingParams

PARAMS = BeamSearchParams(beam_width=4, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(MODEL), max_model_len=512, dtype="float32")


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("stopping", [False, True])
def test_beams_are_those_of_transformers(llm: LLM, penalty: float, stopping: bool) -> None:
    knobs = {"length_penalty": penalty, "early_stopping": stopping}
    params = BeamSearchParams(beam_width=4, max_tokens=12, **knobs)  # type: ignore[arg-type]
    found = llm.beam_search(PROMPTS, params)
    assert len(found) == len(PROMPTS)
    for text, output in zip(PROMPTS, found, strict=True):
        prompt = llm.generate(text, SamplingParams(max_tokens=1), use_tqdm=False)[0]
        size = len(prompt.prompt_token_ids)
        answers = [one.tokens[size:] for one in output.sequences]
        assert answers == reference(tuple(prompt.prompt_token_ids), 4, **knobs)
        for one in output.sequences:
            assert one.tokens[:size] == prompt.prompt_token_ids
            assert one.text.startswith(text)
            assert one.finish_reason in ("stop", "length")
            assert (one.finish_reason == "length") == (len(one.tokens) - size == 12)


def test_a_beam_of_one_is_greedy_and_its_score_that_of_its_tokens(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    (output,) = llm.beam_search(PROMPTS[1], params)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    (expected,) = llm.generate(PROMPTS[1], greedy, use_tqdm=False)
    (one,) = output.sequences
    assert one.tokens == expected.prompt_token_ids + expected.outputs[0].token_ids
    assert one.cum_logprob == pytest.approx(expected.outputs[0].cumulative_logprob, abs=1e-4)


def test_wider_beams_are_no_worse(llm: LLM) -> None:
    best = []
    for width in (1, 2, 8):
        params = BeamSearchParams(beam_width=width, max_tokens=8, ignore_eos=True)
        best.append(llm.beam_search(PROMPTS[1], params)[0].sequences[0].cum_logprob)
    assert best == sorted(best)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 100}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_wrong_values_are_named(llm: LLM, fields: dict[str, Any], param: str) -> None:
    params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
    with pytest.raises(InvalidRequest) as caught:
        llm.beam_search("the", params)
    assert caught.value.param == param
    with pytest.raises(InvalidRequest) as caught:
        llm.beam_search([[5] * 512], PARAMS)
    assert caught.value.param == "prompt"


def test_diffusion_models_refuse_it() -> None:
    with pytest.raises(Unsupported, match="one token after the other"):
        LLM("demo-block", max_model_len=128).beam_search("the", PARAMS)


async def test_the_client_searches_alike(faces: Faces, stack: Stack) -> None:
    options = CallOptions(return_token_ids=True)
    async with AsyncClient(f"{HOST}:{stack.grpc_port}") as client:
        answer = await client.generate(PROMPTS[0], PARAMS, options)
        chat = await client.chat("json: tom 31 rome", PARAMS)
        with pytest.raises(InvalidRequest, match="cannot be streamed"):
            _ = [delta async for delta in client.generate_stream(PROMPTS[0], PARAMS)]
    found = [
        choice.token_ids[: -1 if choice.finish_reason == "stop" else None]
        for choice in answer.choices
    ]
    assert found == reference(tuple(answer.prompt_token_ids), 4)
    assert len(chat.choices) == 4
