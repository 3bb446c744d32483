"""Keys in front of every route and method of a real frontend, asked by real client libraries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.api.grpc_oip import OipServicer
from frontend.api.grpc_text import TextServicer
from frontend.api.routes import build_http
from frontend.gate import Gate
from tests.service.frontends import Stack, stack
from tests.waiting import PATIENCE_S, until
from tidemill.client import AsyncClient
from tidemill.exchange import CallOptions
from tidemill.oip import open_inference_pb2 as oip
from tidemill.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from tidemill.runtime import rpc
from tidemill.runtime.errors import Unauthenticated
from tidemill.sampling_params import SamplingParams
from tidemill.security.keys import NewKey, new_key

WAIT = CallOptions(timeout_s=PATIENCE_S)
SOME = SamplingParams(max_tokens=4)
PROMPT = "whom nobody else may see"
OPEN = {"/", "/ping", "/health", "/health/live", "/health/ready", "/v1/health"}
OPEN |= {"/v2/health/live", "/v2/health/ready"}
PROBES = {"ServerLive", "ServerReady"}


def written(folder: Path, *made: NewKey) -> str:
    path = folder / "keys"
    path.write_text("".join(f"{one.line}\n" for one in made))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_route_but_health_and_the_page_asks_for_a_key(tmp_path: Path) -> None:
    """Also tokenize, metrics, the document, and what does not exist."""
    made = new_key("alice")
    async with stack(tmp_path, api_keys_file=written(tmp_path, made)) as served:
        document = build_http(served.frontend.desk, Gate(served.frontend.desk.config)).openapi()
        routes = [(path, m.upper()) for path, ms in document["paths"].items() for m in ms]
        assert len(routes) > 25
        routes += [("/openapi.json", "GET"), ("/ui/model", "GET")]
        routes += [("/ui/pieces", "GET"), ("/nothing/here", "GET"), ("/v1/models/", "PUT")]
        async with served.http() as client:
            for path, method in routes:
                path = path.replace("{name}", "x")
                for shown in ({}, bearer("tm-wrong")):
                    answer = await client.request(method, path, headers=shown, content=b"{}")
                    assert (answer.status_code == 401) is (path not in OPEN), (method, path)
                    assert answer.headers["x-request-id"]
                    if path not in OPEN:
                        assert answer.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/ui/app.js")).status_code == 200
            for path in ("/metrics", "/v1/models", "/openapi.json"):
                assert (await client.get(path, headers=bearer(made.key))).status_code == 200
            assert (await client.get("/nothing", headers=bearer(made.key))).status_code == 404


async def test_metrics_are_public_where_the_operator_says_so(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, api_key="k" * 40, public_metrics=True) as served,
        served.http() as client,
    ):
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/version")).status_code == 401


async def test_health_tells_strangers_a_word_and_nothing_else(tmp_path: Path) -> None:
    """Addresses of engines, errors and load are for those who have a key."""
    made = new_key("alice")
    async with (
        stack(tmp_path, api_keys_file=written(tmp_path, made)) as served,
        served.http() as client,
    ):
        for shown in ({}, bearer("tm-wrong")):
            assert (await client.get("/health", headers=shown)).json().keys() == {"status"}
        known = (await client.get("/health", headers=bearer(made.key))).json()
        assert known["engine"]["address"]
    async with stack(tmp_path / "open") as served, served.http() as client:
        assert (await client.get("/health")).json()["engine"]["address"]


async def test_client_libraries_know_what_a_refused_key_is(tmp_path: Path) -> None:
    made = new_key("alice")
    async with stack(tmp_path, api_keys_file=written(tmp_path, made)) as served:
        ask = {"model": "fake", "max_tokens": 3}
        said: Any = [{"role": "user", "content": "ab"}]
        for key, code in (("tm-wrong", "invalid_api_key"), (made.key, None)):
            async with (
                openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key) as theirs,
                anthropic.AsyncAnthropic(base_url=served.url, api_key=key) as others,
            ):
                if code is None:
                    assert (await theirs.chat.completions.create(messages=said, **ask)).choices
                    assert (await others.messages.create(messages=said, **ask)).content
                    continue
                with pytest.raises(openai.AuthenticationError) as refused:
                    await theirs.chat.completions.create(messages=said, **ask)
                assert (refused.value.status_code, refused.value.code) == (401, code)
                assert refused.value.type == "invalid_request_error"
                with pytest.raises(anthropic.AuthenticationError) as other:
                    await others.messages.create(messages=said, **ask)
                body: Any = other.value.body
                assert body["error"]["type"] == "authentication_error"
        async with served.http() as client:
            missing = (await client.get("/v1/models")).json()["error"]
            assert missing["code"] == "missing_api_key"
            assert made.key not in str(missing)


async def test_every_method_but_health_asks_for_a_key(tmp_path: Path) -> None:
    made = new_key("alice")
    flags = {"api_keys_file": written(tmp_path, made), "reflection": True}
    async with (
        stack(tmp_path, **flags) as served,
        grpc.aio.insecure_channel(served.grpc_address) as channel,
    ):
        methods = {
            f"/{kind.contract.full_name}/{one.name}"
            for kind in (TextServicer, OipServicer)
            for one in kind.contract.methods
        }
        assert len(methods) > 15
        probes = {f"/{OipServicer.contract.full_name}/{name}" for name in PROBES}
        for method in probes:
            assert await channel.unary_unary(method)(b"", timeout=PATIENCE_S)
        methods -= probes
        for method in methods:
            for shown in ((), (("authorization", "Bearer tm-wrong"),)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(method)(b"", metadata=shown, timeout=PATIENCE_S)
                error = rpc.to_error(refused.value)
                assert isinstance(error, Unauthenticated), method
                assert error.reason == ("INVALID_API_KEY" if shown else "MISSING_API_KEY")
        reflection = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in reflection(iter([b""])):
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        assert await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
        async with AsyncClient(served.grpc_address, api_key=made.key) as text:
            assert (await text.generate("ab", SOME, WAIT)).text == "abab"
            stream = [delta async for delta in text.generate_stream("ab", SOME, WAIT)]
            assert "".join(delta.text for delta in stream) == "abab"
            assert await text.tokenize("ab")


async def test_keys_come_and_go_while_the_frontend_runs(tmp_path: Path) -> None:
    old, new = new_key("alice"), new_key("alice")
    path = written(tmp_path, old)
    async with stack(tmp_path, api_keys_file=path) as served, served.http() as client:

        async def status(one: NewKey) -> int:
            return (await client.get("/v1/models", headers=bearer(one.key))).status_code

        assert (await status(old), await status(new)) == (200, 401)
        written(tmp_path, new)
        async with asyncio.timeout(PATIENCE_S):
            while (await status(old), await status(new)) != (401, 200):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_every_request_of_a_stream_is_asked_about(tmp_path: Path) -> None:
    """One call, many requests: each counts, and none is answered once the key is gone."""
    kept, deleted = new_key("alice"), new_key("bob")
    path = written(tmp_path, kept, deleted)
    asked = oip.ModelInferRequest(
        model_name="fake",
        inputs=[
            oip.ModelInferRequest.InferInputTensor(
                name="text_input",
                datatype="BYTES",
                shape=[1],
                contents=oip.InferTensorContents(bytes_contents=[b"c"]),
            )
        ],
        parameters={"max_tokens": oip.InferParameter(int64_param=1)},
    )
    async with (
        stack(tmp_path, api_keys_file=path, key_requests_per_minute=3) as served,
        grpc.aio.insecure_channel(served.grpc_address) as channel,
    ):
        stub = GRPCInferenceServiceStub(channel)

        async def answers(key: str) -> AsyncIterator[Any]:
            call = stub.ModelStreamInfer(metadata=(("authorization", f"Bearer {key}"),))
            while True:
                await call.write(asked)
                yield await call.read()

        async with aclosing(answers(kept.key)) as stream, asyncio.timeout(PATIENCE_S):
            said = [(await anext(stream)).error_message for _ in range(4)]
            assert said[:3] == [""] * 3
            assert "this key may use 3 requests per minute" in said[3]
        async with aclosing(answers(deleted.key)) as stream, asyncio.timeout(PATIENCE_S):
            assert not (await anext(stream)).error_message
            written(tmp_path, kept)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stream:
                    pass
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_who_asks_is_told_to_the_engine_and_nobody_takes_anothers_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key's name is the request's share, whatever the client says; the log has it too."""
    caplog.set_level(logging.INFO)
    made = new_key("alice")
    async with stack(tmp_path, api_keys_file=written(tmp_path, made)) as served:
        async with AsyncClient(served.grpc_address, api_key=made.key) as text:
            await text.generate("ab", SOME, CallOptions(timeout_s=PATIENCE_S, fairness_key="bob"))
        async with served.http() as client:
            body = {"prompt": "ab", "max_tokens": 3}
            await client.post("/v1/completions", json=body, headers=bearer(made.key))
        assert [spec.fairness_key for spec in served.engine.submits] == ["alice", "alice"]
    lines = [vars(one) for one in caplog.records if one.name == "tidemill.frontend.request"]
    assert [(line["key"], line["client"]) for line in lines] == [("alice", "127.0.0.1")] * 2
    assert [line["call"] for line in lines] == ["Generate", "/v1/completions"]


async def test_without_keys_the_clients_own_share_counts(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, AsyncClient(served.grpc_address) as text:
        await text.generate("ab", SOME, CallOptions(timeout_s=PATIENCE_S, fairness_key="bob"))
        assert [spec.fairness_key for spec in served.engine.submits] == ["bob"]


async def drive(served: Stack, key: str) -> None:
    """Requests of all sorts, the wrong ones included, all with the same prompt."""
    async with served.http() as client:
        for path, body in (
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}),
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "stream": True}),
            ("/v1/completions", {"prompt": PROMPT, "temperature": -1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "n": 99}),
            ("/v1/embeddings", {"input": PROMPT}),
            ("/tokenize", {"prompt": PROMPT}),
        ):
            await client.post(path, json=body, headers=bearer(key))
        await client.post("/v1/completions", json={"prompt": PROMPT}, headers=bearer("tm-wrong"))
    async with AsyncClient(served.grpc_address, api_key=key) as text:
        await text.generate(PROMPT, SOME, WAIT)


async def test_neither_keys_nor_prompts_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At any level, the libraries' own lines included; an operator may ask for prompts, cut."""
    caplog.set_level(logging.DEBUG)
    made = new_key("alice")
    path = written(tmp_path, made)
    for shown in (0, 7):
        caplog.clear()
        async with stack(tmp_path, api_keys_file=path, log_prompts=shown) as served:
            await drive(served, made.key)
            await until(lambda: "/tokenize" in caplog.text)
        ours = [one for one in caplog.records if not one.name.startswith(("httpx", "httpcore"))]
        logged = "\n".join(f"{one.getMessage()} {vars(one)}" for one in ours)
        assert "request finished" in logged
        assert made.key not in logged
        assert "tm-wrong" not in logged
        assert PROMPT[:8] not in logged
        assert (PROMPT[:7] in logged) is bool(shown)


async def test_one_line_says_how_each_request_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Method, path, client, status and seconds; probes are not worth a line."""
    caplog.set_level(logging.INFO)
    async with stack(tmp_path, trusted_proxies="127.0.0.0/8") as served:
        headers = {"x-forwarded-for": "6.6.6.6, 1.2.3.4", "x-request-id": "abc"}
        async with served.http() as client:
            for path in ("/health", "/metrics", "/load", "/version", "/nowhere"):
                await client.get(path, headers=headers)
            await client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
            await client.post("/v1/completions", content=b"{", headers=headers)
    lines = [vars(one) for one in caplog.records if one.name == "tidemill.frontend.http"]
    assert [(line["message"], line["client"]) for line in lines] == [
        ("GET /version 200", "1.2.3.4"),
        ("GET /nowhere 404", "1.2.3.4"),
        ("POST /v1/completions 400", "1.2.3.4"),
    ]
    assert all(line["request_id"] == "abc" and 0 <= line["seconds"] < 60 for line in lines)
