"""A model of several names: all of them answer on every face, each as what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.service.frontends import Stack, stack
from tests.waiting import until
from tidemill.client import AsyncClient
from tidemill.oip import open_inference_pb2 as oip
from tidemill.oip import open_inference_pb2_grpc as oip_rpc
from tidemill.runtime.errors import InvalidRequest, NotFound
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

NAMES = ("first", "org/second", "third")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def served(tmp_path: Path) -> Any:
    async with stack(tmp_path, served_model_name=",".join(NAMES)) as running:
        yield running
        await until(lambda: running.frontend.desk.fleet.num_slots == 0)


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    "completion": ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    "message": ("/v1/messages", {"messages": HI, "max_tokens": 2}),
    "response": ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    "embedding": ("/v1/embeddings", {"input": "hi"}),
    "score": ("/v1/score", {"text_1": "a", "text_2": "b"}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
}


def model_of(event: dict[str, Any]) -> str | None:
    """Of a chunk, a first message or a response."""
    inner = event.get("message") or event.get("response") or event
    return inner.get("model")


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("name", [*NAMES, "", "fake"])
async def test_answers_bear_the_name_that_was_asked_for(
    served: Stack, path: str, name: str
) -> None:
    url, body = ASKED[path]
    async with served.http() as client:
        answer = await client.post(url, json=body | {"model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == (name or "first")


@pytest.mark.parametrize("path", ["chat", "completion", "message", "response"])
async def test_streams_bear_it_too(served: Stack, path: str) -> None:
    url, body = ASKED[path]
    async with served.http() as client:
        answer = await client.post(url, json=body | {"model": "third", "stream": True})
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    told = {model_of(json.loads(line)) for line in lines} - {None}
    assert told == {"third"}, answer.text


async def test_unknown_names_are_not_found(served: Stack) -> None:
    async with served.http() as client:
        for url, body in ASKED.values():
            for name in ("first,third", "First", "second"):
                answer = await client.post(url, json=body | {"model": name})
                assert answer.status_code == 404, (url, name, answer.text)
                assert "'first', 'org/second', 'third'" in answer.text


async def test_models_are_listed_under_all_names(served: Stack) -> None:
    async with served.http() as client:

        async def page(**query: Any) -> tuple[list[str], bool]:
            found = (await client.get("/v1/models", params=query)).json()
            ids = [one["id"] for one in found["data"]]
            ends = (ids[0], ids[-1]) if ids else (None, None)
            assert (found["first_id"], found["last_id"]) == ends
            return ids, found["has_more"]

        assert await page() == (list(NAMES), False)
        assert await page(limit=2) == (["first", "org/second"], True)
        assert await page(limit=2, after_id="org/second") == (["third"], False)
        assert await page(limit=1, before_id="third") == (["org/second"], True)
        assert await page(before_id="first") == ([], False)
        for name in NAMES:
            card = (await client.get(f"/v1/models/{name}")).json()
            assert (card["id"], card["display_name"], card["root"]) == (name, name, "fake")
        assert (await client.get("/v1/models/fourth")).status_code == 404
        assert (await client.get("/health")).json()["model"] == "first"
        body = {"prompt": "hi", "model": "third", "max_tokens": 2}
        await client.post("/v1/completions", json=body)
        metrics = (await client.get("/metrics")).text
    assert 'tidemill_prompt_tokens_total{model_name="first"} 2.0' in metrics
    assert "third" not in metrics


async def test_the_same_over_grpc(served: Stack) -> None:
    async with AsyncClient(served.grpc_address) as client:
        assert [one.id for one in await client.list_models()] == list(NAMES)
        assert (await client.get_model("third")).id == "third"
        with pytest.raises(NotFound, match="serves 'first', 'org/second', 'third'"):
            await client.get_model("fourth")
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = rpc.TextServiceStub(channel)
        options = {"model": "third", "sampling": {"max_tokens": 2}}
        for asked in (options, {}):
            request = pb.TextServiceGenerateRequest(prompt={"text": "hi"}, options=asked)
            assert (await stub.Generate(request)).model == asked.get("model", "first")


async def test_the_same_over_the_inference_protocol(served: Stack) -> None:
    parameters = {"max_tokens": 2}
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    async with served.http() as client:
        for name in NAMES:
            at = f"/v2/models/{name}"
            assert (await client.get(at)).json()["name"] == name
            assert (await client.get(f"{at}/ready")).json()["name"] == name
            body = {"inputs": [text], "parameters": parameters}
            assert (await client.post(f"{at}/infer", json=body)).json()["model_name"] == name
            body = {"text_input": "hi", "parameters": parameters}
            assert (await client.post(f"{at}/generate", json=body)).json()["model_name"] == name
        assert (await client.get("/v2/models/fourth")).status_code == 404
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = oip_rpc.GRPCInferenceServiceStub(channel)
        request = oip.ModelInferRequest(model_name="third")
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"hi")
        request.parameters["max_tokens"].int64_param = 2
        assert (await stub.ModelInfer(request)).model_name == "third"
        named = await stub.ModelMetadata(oip.ModelMetadataRequest(name="third"))
        assert named.name == "third"


async def test_an_empty_name_ends_the_start() -> None:
    config = FrontendConfig(http_port=0, grpc_port=0, served_model_name="a,,b")
    with pytest.raises(InvalidRequest, match=r"served_model_name 'a,,b' has an empty name"):
        await FrontendServer.start(config)
