"""Embeddings, scores and ranks over HTTP and gRPC, in front of an engine that counts ids."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from frontend.validation import MAX_PROMPTS
from tests.service.fake_engine import POOLED, pooled
from tests.service.frontends import Stack, frontend_for, make_engine, serving, stack
from tests.waiting import PATIENCE_S, http_client, until
from tidemill.runtime.errors import Overloaded
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import text_pb2, text_pb2_grpc


def expected(text: str | list[int], **fields: Any) -> list[float]:
    ids = list(text.encode()) if isinstance(text, str) else text
    return pooled(ids, pb.PoolRequest(**fields))


def cosine(left: str, right: str) -> float:
    return sum(a * b for a, b in zip(expected(left), expected(right), strict=True))


@asynccontextmanager
async def sdk(served: Stack):
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="any", max_retries=0
    ) as client:
        yield client


@asynccontextmanager
async def text_stub(served: Stack):
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        yield text_pb2_grpc.TextServiceStub(channel)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("tide", ["tide"]),
        (["tide", "mole"], ["tide", "mole"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [9]], [[1, 2], [9]]),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_the_sdk_gets_a_vector_for_every_input(
    tmp_path: Path, given: Any, inputs: list[Any], encoding: str | None
) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        fields = {} if encoding is None else {"encoding_format": encoding}
        answer = await client.embeddings.create(model="fake", input=given, **fields)
        assert [one.index for one in answer.data] == list(range(len(inputs)))
        assert {one.object for one in answer.data} == {"embedding"}
        for one, text in zip(answer.data, inputs, strict=True):
            vector = one.embedding
            if encoding == "base64":
                vector = struct.unpack(f"<{POOLED}f", base64.b64decode(vector))
            assert list(vector) == pytest.approx(expected(text), abs=1e-6)
        size = sum(len(text) for text in inputs)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == size
        assert answer.model == "fake"


async def test_dimensions_and_length_are_the_callers(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        answer = await client.embeddings.create(
            model="fake", input="tide", dimensions=3, extra_body={"normalize": False, "priority": 3}
        )
        assert answer.data[0].embedding == expected("tide", dimensions=3, normalize=False)
        (asked,) = served.engine.pools
        assert (asked.dimensions, asked.normalize, asked.task) == (3, False, pb.POOL_TASK_EMBED)
        assert asked.priority == 3
        assert not asked.HasField("pooling")


async def test_many_inputs_come_back_in_their_order(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        texts = [f"{n} " * (1 + n % 7) for n in range(200)]
        answer = await client.embeddings.create(model="fake", input=texts)
        for one, text in zip(answer.data, texts, strict=True):
            assert one.embedding == pytest.approx(expected(text), abs=1e-6)


async def test_inputs_are_truncated_only_when_asked(tmp_path: Path) -> None:
    async with stack(tmp_path, engine={"max_model_len": 8}) as served, served.http() as http:
        text = "0123456789"
        for keep, size in ((3, 3), (-1, 8), (20, None), (None, None)):
            body = {"model": "fake", "input": text, "truncate_prompt_tokens": keep}
            answer = await http.post("/v1/embeddings", json=body)
            if size is None:
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_length_exceeded"
                assert "maximum context length is 8" in answer.json()["error"]["message"]
            else:
                assert answer.json()["usage"]["prompt_tokens"] == size
                vector = answer.json()["data"][0]["embedding"]
                assert vector == pytest.approx(expected(text[:size]), abs=1e-6)
        too_long = {"model": "fake", "input": [999_999] * 9}  # whose ids are not looked at
        answer = await http.post("/v1/embeddings", json=too_long)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("embeddings", {}, "input"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": ""}, "input"),
        ("embeddings", {"input": ["a", ""]}, "input"),
        ("embeddings", {"input": [[]]}, "input"),
        ("embeddings", {"input": [[10**6]]}, "input"),
        ("embeddings", {"input": ["a"] * 1025}, "input"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("embeddings", {"input": "a", "dimensions": 9}, "dimensions"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("embeddings", {"input": "a", "messages": [{}]}, "messages"),
        ("embeddings", {"input": "a", "temperature": 1.0}, "temperature"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "", "documents": ["b"]}, "query"),
        ("rerank", {"query": "a", "documents": [""]}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "a", "documents": ["b"], "rank_fields": ["t"]}, "rank_fields"),
        ("score", {"text_1": "a", "text_2": []}, "text_2"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("score", {"text_1": "a", "text_2": ["c", ""]}, "text_2"),
    ],
)
async def test_bad_input_is_refused_by_name(
    tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async with stack(tmp_path) as served, served.http() as http:
        answer = await http.post(f"/v1/{path}", json={"model": "fake", **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].split(".")[0] == param, answer.text
        assert not served.engine.pools


async def test_another_model_is_not_found(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, sdk(served) as client:
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="a")


async def test_the_engines_refusal_is_the_answer(tmp_path: Path) -> None:
    refusal = Overloaded("the queue is full", retry_after_ms=1500)
    async with stack(tmp_path, engine={"refuse": refusal}) as served, served.http() as http:
        answer = await http.post("/v1/embeddings", json={"input": ["a", "b"]})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "2"
        metrics = (await http.get("/metrics")).text
        assert 'tidemill_request_failure_total{error_type="queue_full",model_name="fake"} 1.0' in (
            metrics
        )


async def test_a_client_that_leaves_ends_its_inputs(tmp_path: Path) -> None:
    async with stack(tmp_path, engine={"hold": True}) as served, sdk(served) as client:
        call = asyncio.create_task(client.embeddings.create(model="fake", input=["a", "b", "c"]))
        await until(lambda: served.engine.live == 3)
        assert served.frontend.desk.num_live == 1
        call.cancel()
        await until(lambda: served.engine.live == 0)
        await until(lambda: served.frontend.desk.num_live == 0)


async def test_a_deadline_is_504(tmp_path: Path) -> None:
    async with stack(tmp_path, engine={"hold": True}) as served, served.http() as http:
        headers = {"x-request-timeout-ms": "100"}
        answer = await http.post("/v1/embeddings", json={"input": "a"}, headers=headers)
        assert answer.status_code == 504
        assert served.engine.pools[0].timeout_ms <= 100


async def test_a_deadline_in_thousands_of_years_has_not_passed(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as http:
        headers = {"x-request-timeout-ms": 15 * "9"}
        answer = await http.post("/v1/embeddings", json={"input": "a"}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert served.engine.pools[0].timeout_ms > 10**14


async def test_a_model_without_embeddings_says_so(tmp_path: Path) -> None:
    async with stack(tmp_path, engine={"pool_tasks": ()}) as served, served.http() as http:
        for path, body in (
            ("embeddings", {"input": "a"}),
            ("rerank", {"query": "a", "documents": ["b"]}),
            ("score", {"text_1": "a", "text_2": "b"}),
        ):
            answer = await http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "model"
            assert "'fake' does not serve" in answer.json()["error"]["message"]


DOCUMENTS = ["mole", "edit", "tide", "sea"]


async def test_scores_are_cosines_of_embeddings(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as http:
        body = {"text_1": "tide", "text_2": DOCUMENTS}
        for path in ("/v1/score", "/score"):
            answer = (await http.post(path, json=body)).json()
            got = [one["score"] for one in answer["data"]]
            assert got == pytest.approx([cosine("tide", one) for one in DOCUMENTS], abs=1e-6)
        assert answer["object"] == "list"
        assert answer["data"][1] == {"index": 1, "object": "score", "score": got[1]}
        # A text is embedded once: "tide" is a document as well.
        assert answer["usage"]["prompt_tokens"] == len("tidemilleditsea")
        pairs = {"text_1": ["a", "bc"], "text_2": ["ab", "bc"]}
        answer = (await http.post("/v1/score", json=pairs)).json()
        got = [one["score"] for one in answer["data"]]
        assert got == pytest.approx([math.sqrt(0.5), 1.0], abs=1e-6)


async def test_ranks_are_best_first(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as http:
        body = {"query": "tide", "documents": ["mole", {"text": "tide"}, "edit", "sea"]}
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            answer = (await http.post(path, json=body)).json()
            order = [one["index"] for one in answer["results"]]
            scores = [one["relevance_score"] for one in answer["results"]]
            assert scores == sorted(scores, reverse=True)
            # Equal ones keep their order.
            assert order[:2] == [1, 2]
            assert [one["document"]["text"] for one in answer["results"][:2]] == ["tide", "edit"]
        body |= {"top_n": 1, "return_documents": False}
        answer = (await http.post("/v1/rerank", json=body)).json()
        assert [set(one) for one in answer["results"]] == [{"index", "relevance_score"}]


async def test_as_many_documents_and_pairs_as_are_promised(tmp_path: Path) -> None:
    """Their query is a text of its own, and each pair may be two."""
    texts = [f"{number:04}" for number in range(2 * MAX_PROMPTS)]
    async with stack(tmp_path) as served, served.http() as http:
        body: dict[str, Any] = {"query": "tide", "documents": texts[:MAX_PROMPTS]}
        assert len((await http.post("/v1/rerank", json=body)).json()["results"]) == MAX_PROMPTS
        body["documents"].append("one more")
        answer = await http.post("/v1/rerank", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
        pairs = {"text_1": texts[:MAX_PROMPTS], "text_2": texts[MAX_PROMPTS:]}
        assert len((await http.post("/v1/score", json=pairs)).json()["data"]) == MAX_PROMPTS


async def test_a_cross_encoder_reads_pairs(tmp_path: Path) -> None:
    tasks = (pb.POOL_TASK_EMBED, pb.POOL_TASK_CLASSIFY, pb.POOL_TASK_SCORE)
    async with stack(tmp_path, engine={"pool_tasks": tasks}) as served, served.http() as http:
        body = {"query": "tide", "documents": DOCUMENTS, "truncate_prompt_tokens": 7}
        answer = (await http.post("/v1/rerank", json=body)).json()
        assert [one["index"] for one in answer["results"]] == [1, 2, 3, 0]
        asked = served.engine.pools
        assert {(one.task, one.pair_start) for one in asked} == {(pb.POOL_TASK_SCORE, 4)}
        assert [one.prompt_token_ids[::4] for one in asked] == [
            b"tide" + text[:3].encode() for text in DOCUMENTS
        ]
        body["truncate_prompt_tokens"] = 4
        answer = await http.post("/v1/rerank", json=body)
        assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_a_document_of_white_space_is_refused_by_name(tmp_path: Path) -> None:
    """To many vocabularies of cross-encoders it is nothing, which starts nowhere."""
    engine, _ = make_engine(tmp_path, pool_tasks=(pb.POOL_TASK_SCORE,))
    path = tmp_path / "tokenizer" / "tokenizer.json"
    strips = {"type": "Strip", "strip_left": True, "strip_right": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": strips}))
    async with serving(engine) as port, frontend_for(port) as frontend:
        assert await frontend.desk.fleet.wait_ready(PATIENCE_S)
        async with http_client(f"http://127.0.0.1:{frontend.http_port}") as http:
            body = {"query": "tide", "documents": ["mole", " \n"]}
            answer = await http.post("/v1/rerank", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "documents"), error
    assert "a text without tokens" in error["message"]


async def test_grpc_says_the_same(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, text_stub(served) as stub:
        inputs = [{"text": "tide"}, {"tokens": {"token_ids": [1, 2]}}]
        answer = await stub.Embed(text_pb2.EmbedRequest(inputs=inputs, dimensions=5))
        for one, text in zip(answer.embeddings, ("tide", [1, 2]), strict=True):
            assert list(one.values) == pytest.approx(expected(text, dimensions=5), abs=1e-6)
        assert answer.usage.prompt_tokens == 6
        pairs = [{"left": "tide", "right": text} for text in DOCUMENTS]
        scored = await stub.Score(text_pb2.ScoreRequest(pairs=pairs))
        assert list(scored.scores) == pytest.approx([cosine("tide", d) for d in DOCUMENTS])
        ranked = await stub.Rerank(
            text_pb2.RerankRequest(query="tide", documents=DOCUMENTS, top_n=2)
        )
        assert [one.index for one in ranked.results] == [1, 2]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(text_pb2.EmbedRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
