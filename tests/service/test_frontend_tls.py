"""TLS and mTLS on both faces of a real frontend, with certificates that change while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.certificates import Authority, Pair, shown
from tests.service.frontends import stack
from tests.waiting import PATIENCE_S
from tidemill.client import AsyncClient, Client
from tidemill.exchange import CallOptions
from tidemill.runtime.errors import FailedPrecondition, Unavailable
from tidemill.sampling_params import SamplingParams

WAIT = CallOptions(timeout_s=PATIENCE_S)
SHORT = CallOptions(timeout_s=10)
SOME = SamplingParams(max_tokens=4)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki", "ca")


def flags(pair: Pair, **more: Any) -> dict[str, Any]:
    return {"tls_cert": pair.cert, "tls_key": pair.key, **more}


def https(port: int, context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{port}", verify=context, timeout=PATIENCE_S
    )


async def test_both_faces_speak_tls(tmp_path: Path, authority: Authority) -> None:
    """openai, httpx, and our own clients, blocking and not; nobody gets an answer in plaintext."""
    async with stack(tmp_path, **flags(authority.sign("server"))) as served:
        address, port = served.grpc_address, served.frontend.http_port
        web = DefaultAsyncHttpxClient(verify=authority.context())
        openai = AsyncOpenAI(base_url=f"https://127.0.0.1:{port}/v1", api_key="x", http_client=web)
        async with openai:
            made = await openai.completions.create(model="fake", prompt="ab", max_tokens=3)
            assert made.choices[0].text == "aba"
        async with https(port, authority.context()) as client:
            answer = await client.get("/health")
            assert answer.status_code == 200
            assert answer.headers["strict-transport-security"] == "max-age=31536000"
        async with AsyncClient(address, tls=authority.client()) as text:
            assert (await text.generate("ab", SOME, WAIT)).text == "abab"

        def blocking() -> str:
            with Client(address, tls=authority.client()) as text:
                return text.generate("ab", SOME, WAIT).text

        assert await asyncio.to_thread(blocking) == "abab"
        with pytest.raises(httpx.HTTPError):
            await httpx.AsyncClient().get(f"http://127.0.0.1:{port}/health")
        async with AsyncClient(address, max_retries=0) as text:
            with pytest.raises(Unavailable):
                await text.generate("ab", SOME, SHORT)


async def test_a_server_that_another_ca_signed_is_not_believed(
    tmp_path: Path, authority: Authority
) -> None:
    other = Authority(tmp_path / "other", "ca")
    async with stack(tmp_path, **flags(authority.sign("server"))) as served:
        async with https(served.frontend.http_port, other.context()) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/health")
        async with AsyncClient(served.grpc_address, tls=other.client(), max_retries=0) as text:
            with pytest.raises(Unavailable):
                await text.generate("ab", SOME, SHORT)


async def test_mutual_tls_lets_in_whom_the_ca_signed(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """... and nobody without a certificate, or with one of another CA, on either face. The log says
    why, of which HTTP's clients see no more than a connection that is reset."""
    caplog.set_level(logging.INFO, "tidemill.security")
    strangers = Authority(tmp_path / "other", "ca")
    mine, forged = authority.sign("client", "me"), strangers.sign("client", "me")
    asked = flags(authority.sign("server"), tls_client_ca=authority.path)
    async with stack(tmp_path, **asked) as served:
        address, port = served.grpc_address, served.frontend.http_port
        async with https(port, authority.context(mine)) as client:
            assert (await client.get("/v1/models")).status_code == 200
        async with AsyncClient(address, tls=authority.client(mine)) as text:
            assert (await text.generate("ab", SOME, WAIT)).text == "abab"
        assert "handshake" not in caplog.text
        whys = ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "unable to get local issuer certificate")
        for own, why in zip((None, forged), whys, strict=True):
            async with https(port, authority.context(own)) as client:
                with pytest.raises(httpx.HTTPError):
                    await client.get("/health")
            assert f"a client's TLS handshake failed: {why}" in caplog.text
            async with AsyncClient(address, tls=authority.client(own), max_retries=0) as text:
                with pytest.raises(Unavailable):
                    await text.generate("ab", SOME, SHORT)


def half_renewed(authority: Authority, pair: Pair) -> Callable[[], object]:
    """A new certificate beside the old key: a renewal that is half done, or wrong. Returns what
    finishes it."""
    path = Path(pair.key)
    old = path.read_bytes()
    authority.sign("server")
    new = path.read_bytes()
    path.write_bytes(old)
    return lambda: path.write_bytes(new)


def join(target: str, *sources: str) -> str:
    """All of the files in one."""
    Path(target).write_bytes(b"".join(Path(source).read_bytes() for source in sources))
    return target


async def test_a_renewed_certificate_serves_new_connections_and_old_streams_go_on(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tidemill.security")
    pair = authority.sign("server")
    async with stack(tmp_path, engine={"hold_after": 3}, **flags(pair)) as served:
        grpc_port, http_port = served.frontend.grpc_port, served.frontend.http_port
        async with (
            AsyncClient(served.grpc_address, tls=authority.client()) as text,
            https(http_port, authority.context()) as client,
        ):
            long = SamplingParams(max_tokens=12)
            deltas = text.generate_stream("ab", long, WAIT)
            begun = (await anext(deltas)).text
            body = {"prompt": "ab", "max_tokens": 12, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                assert "data:" in await anext(lines)
                context = authority.context()
                ports = (grpc_port, http_port)
                before = [await asyncio.to_thread(shown, port, context) for port in ports]

                finish = half_renewed(authority, pair)
                kept = [await asyncio.to_thread(shown, port, context) for port in ports]
                assert kept == before
                assert "what was read before stays" in caplog.text

                finish()
                after = [await asyncio.to_thread(shown, port, context) for port in ports]
                assert after[0] == after[1]
                assert after[0] not in before
                served.engine.hold_after = None
                rest = "".join([line async for line in lines])
            assert "[DONE]" in rest
            assert begun + "".join([delta.text async for delta in deltas]) == "ab" * 6


async def test_a_ca_that_is_taken_out_lets_nobody_in(tmp_path: Path, authority: Authority) -> None:
    """Also not those whose earlier connection could be resumed."""
    other = Authority(tmp_path / "other", "ca")
    callers = join(str(tmp_path / "callers.pem"), authority.path, other.path)
    mine, theirs = authority.sign("client", "me"), other.sign("client", "they")
    asked = flags(authority.sign("server"), tls_client_ca=callers)
    async with stack(tmp_path, **asked) as served:
        address, port = served.grpc_address, served.frontend.http_port
        context = authority.context(theirs)
        async with https(port, context) as client:
            assert (await client.get("/health/live")).status_code == 200
        async with AsyncClient(address, tls=authority.client(theirs)) as text:
            await text.list_models()
        join(callers, authority.path)
        async with https(port, context) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/health/live")
        async with AsyncClient(address, tls=authority.client(theirs), max_retries=0) as text:
            with pytest.raises(Unavailable):
                await text.generate("ab", SOME, SHORT)
        async with https(port, authority.context(mine)) as client:
            assert (await client.get("/health/live")).status_code == 200


async def test_probes_without_tls_have_a_port_that_serves_health_alone(
    tmp_path: Path, authority: Authority
) -> None:
    asked = flags(authority.sign("server"), tls_client_ca=authority.path, health_port=0)
    async with stack(tmp_path, **asked) as served:
        port = served.frontend.health_port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            question = health_pb2.HealthCheckRequest(service="readiness")
            async with asyncio.timeout(PATIENCE_S):
                async for answer in stub.Watch(question):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
            models = channel.unary_unary("/tidemill.v1.TextService/ListModels")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await models(b"")
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("broken", ["missing", "foreign key", "no key", "not PEM"])
async def test_a_start_with_files_that_do_not_serve_names_the_flag(
    tmp_path: Path, authority: Authority, broken: str
) -> None:
    pair, other = authority.sign("server"), authority.sign("other")
    asked: dict[str, Any] = {
        "missing": {"tls_cert": str(tmp_path / "nothing.crt"), "tls_key": pair.key},
        "foreign key": {"tls_cert": pair.cert, "tls_key": other.key},
        "no key": {"tls_cert": pair.cert},
        "not PEM": flags(pair, tls_client_ca=__file__),
    }[broken]
    config = FrontendConfig(http_port=0, grpc_port=0, **asked)
    with pytest.raises(FailedPrecondition, match="--tls-cert"):
        await FrontendServer.start(config)
