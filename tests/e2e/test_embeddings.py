"""Embeddings, scores and ranks of real processes: a decoder and a BERT, over every face."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.e2e.real_stack import HOST, Stack, free_port, frontend, running
from tests.models.encoders import write, write_tokenizer
from tests.waiting import PATIENCE_S
from tidemill import LLM, Client, SamplingParams
from tidemill.exchange import CallOptions
from tidemill.runtime.errors import InvalidRequest, Unsupported

TEXTS = ["reverse: harbour", "sort: dbca", "ROMEO: " * 20, "x"]
CLOSE = 2e-5


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory):
    """A cross-encoder's folder, transformers' model of it, and its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    model = write(folder, "BertForSequenceClassification", num_labels=1)
    return folder, model, write_tokenizer(folder)


@pytest.fixture(scope="module")
def served(bert, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    logs, port = tmp_path_factory.mktemp("stack"), free_port()
    flags = (f"--engine-port={port}", "--drain-timeout-s=1")
    with (
        running(logs, "engine", str(bert[0]), *flags),
        frontend(logs, port, "--served-model-name=bert") as stack,
    ):
        stack.wait_ready()
        yield stack


def relevance(bert, left: str, right: str) -> float:
    encoded = bert[2].encode(left, right)
    with torch.no_grad():
        logits = bert[1](
            torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])
        ).logits
    return float(logits.sigmoid())


async def test_a_decoder_embeds_beside_chats(stack: Stack) -> None:
    """The same numbers over HTTP, gRPC and offline, while others generate."""
    llm = LLM("demo")
    offline = [one.embedding for one in llm.embed(TEXTS)]
    ask = {"model": "demo", "messages": [{"role": "user", "content": "sort: dbca"}]}
    async with (
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as client,
        httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as http,
    ):
        body = {**ask, "temperature": 0}
        chats = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in "abcd"]
        answer = await client.embeddings.create(model="demo", input=TEXTS)
        cut = await client.embeddings.create(model="demo", input=TEXTS, dimensions=16)
        for chat in chats:
            said = (await chat).json()["choices"][0]["message"]["content"]
            assert said.strip() == "abcd"
    got = np.array([one.embedding for one in answer.data])
    np.testing.assert_allclose(got, offline, atol=CLOSE)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)
    short = got[:, :16] / np.linalg.norm(got[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose([one.embedding for one in cut.data], short, atol=CLOSE)
    with Client(f"{HOST}:{stack.grpc_port}") as typed:
        again = typed.embed(TEXTS)
        np.testing.assert_allclose(again.vectors, offline, atol=CLOSE)
        assert again.usage.prompt_tokens == answer.usage.prompt_tokens
        scores = typed.score([(TEXTS[0], text) for text in TEXTS])
        np.testing.assert_allclose(scores.scores, got @ got[0], atol=CLOSE)
        ranks = typed.rerank(TEXTS[0], TEXTS, top_n=2)
        assert ranks[0].index == 0
        assert (
            ranks[0].score >= ranks[1].score == pytest.approx(sorted(got @ got[0])[-2], abs=CLOSE)
        )
        np.testing.assert_allclose(llm.score(TEXTS[0], TEXTS), got @ got[0], atol=CLOSE)
        with pytest.raises(InvalidRequest) as refused:
            typed.embed("a", options=CallOptions(echo=True))
        assert refused.value.param == "echo"
        with pytest.raises(InvalidRequest) as refused:
            typed.embed("a", dimensions=10_000)
        assert refused.value.param == "dimensions"


def test_offline_prompts_are_pooled_beside_others() -> None:
    llm = LLM("demo")
    waiting = llm.add_request("sort: dbca =", SamplingParams(temperature=0.0, max_tokens=6))
    alone = llm.embed("x")[0].embedding
    for kind in ("mean", "cls", "last"):
        (one,) = llm.embed([1, 2, 3], pooling=kind, normalize=False, dimensions=7)
        assert (len(one.embedding), one.prompt_token_ids) == (7, [1, 2, 3])
    while llm.get_output(waiting) is None:
        llm.step()
    np.testing.assert_allclose(llm.embed("x")[0].embedding, alone, atol=CLOSE)
    for wrong in ({"pooling": "max"}, {"dimensions": 0}, {"truncate_prompt_tokens": 0}):
        with pytest.raises(InvalidRequest) as refused:
            llm.embed("x", **wrong)
        assert refused.value.param in wrong
    with pytest.raises(InvalidRequest, match="context length"):
        llm.embed("x " * 5000)
    assert len(llm.embed("x " * 5000, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 2048
    for given in ("xyz", [1, 2, 3]):  # no number is too large to keep all
        assert len(llm.embed([given], truncate_prompt_tokens=1 << 64)[0].prompt_token_ids) == 3
    assert not llm.has_unfinished_requests


DOCUMENTS = ["tide", "the mill at sea", "a b c d e f g", "harbour"]


async def test_a_cross_encoder_over_http(served: Stack, bert) -> None:
    expected = [relevance(bert, "sea tide", text) for text in DOCUMENTS]
    async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as http:
        body = {"model": "bert", "text_1": "sea tide", "text_2": DOCUMENTS}
        scores = (await http.post("/v1/score", json=body)).json()
        got = [one["score"] for one in scores["data"]]
        np.testing.assert_allclose(got, expected, atol=CLOSE)
        body = {"model": "bert", "query": "sea tide", "documents": DOCUMENTS}
        ranks = (await http.post("/v1/rerank", json=body)).json()["results"]
        assert [one["index"] for one in ranks] == np.argsort(-np.array(expected)).tolist()
        body = {"model": "bert", "text_1": "a " * 20, "text_2": "b " * 60}
        refused = await http.post("/v1/score", json=body)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        cut = await http.post("/v1/score", json={**body, "truncate_prompt_tokens": -1})
        # [CLS] 20 [SEP] 41 [SEP]
        wanted = relevance(bert, "a " * 20, "b " * 41)
        assert cut.json()["data"][0]["score"] == pytest.approx(wanted, abs=CLOSE)
        assert cut.json()["usage"]["prompt_tokens"] == 64


async def test_an_encoder_embeds_and_does_not_chat(served: Stack, bert) -> None:
    _, model, tokenizer = bert
    texts = ["tide", "the mill at sea"]
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="any", max_retries=0
    ) as client:
        answer = await client.embeddings.create(model="bert", input=texts)
        for one, text in zip(answer.data, texts, strict=True):
            with torch.no_grad():
                states = model.bert(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            mean = states.mean(0)
            np.testing.assert_allclose(one.embedding, mean / mean.norm(), atol=CLOSE)
        with pytest.raises(openai.BadRequestError, match="is an encoder") as refused:
            await client.chat.completions.create(
                model="bert", messages=[{"role": "user", "content": "hi"}]
            )
        assert refused.value.param == "model"
        with pytest.raises(openai.BadRequestError, match="is an encoder"):
            await client.completions.create(model="bert", prompt="hi")
        assert [model.id async for model in client.models.list()] == ["bert"]
    assert served.health()["status"] == "healthy"


def test_an_encoder_offline(bert) -> None:
    llm = LLM(str(bert[0]))
    scores = llm.score("sea tide", DOCUMENTS)
    expected = [relevance(bert, "sea tide", text) for text in DOCUMENTS]
    np.testing.assert_allclose(scores, expected, atol=CLOSE)
    with pytest.raises(Unsupported, match="is an encoder") as refused:
        llm.generate("hi", use_tqdm=False)
    assert refused.value.param == "model"
