"""TLS between a real frontend and a real engine server, whose certificates are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_service.server.launch import EngineServer
from frontend.app import FrontendServer
from tests.certificates import Authority, shown
from tests.service.engine_fixtures import config, engine
from tests.service.frontends import frontend_for, write_tokenizer
from tests.waiting import PATIENCE_S, free_port, http_client, until
from tidemill.runtime.errors import FailedPrecondition
from tidemill.v1 import engine_pb2, engine_pb2_grpc

NAME = "engine.example"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki", "ca")


def engine_flags(authority: Authority) -> dict[str, str]:
    cert, key = authority.sign("engine", NAME)
    return {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.path}


def frontend_flags(authority: Authority) -> dict[str, str]:
    cert, key = authority.sign("frontend", "frontend")
    return {
        "engine_tls_ca": authority.path,
        "engine_tls_cert": cert,
        "engine_tls_key": key,
        "engine_tls_name": NAME,
    }


@asynccontextmanager
async def before(server: EngineServer, folder: Path, **flags: Any) -> AsyncIterator[FrontendServer]:
    write_tokenizer(folder / "tokenizer")
    tokenizer = str(folder / "tokenizer")
    async with frontend_for(server.port, tokenizer=tokenizer, **flags) as served:
        yield served


async def test_a_frontend_with_a_certificate_gets_its_session(
    tmp_path: Path, authority: Authority
) -> None:
    """One without does not, nor one that speaks plaintext, nor one that expects another name."""
    mine = frontend_flags(authority)
    refused: list[dict[str, Any]] = [
        {},
        {**mine, "engine_tls_cert": None, "engine_tls_key": None},
        {**mine, "engine_tls_name": "another.example"},
    ]
    async with engine(**engine_flags(authority)) as server:
        async with before(server, tmp_path, **mine) as served:
            assert await served.desk.fleet.wait_ready(PATIENCE_S), served.desk.fleet.last_error
            async with http_client(f"http://127.0.0.1:{served.http_port}") as client:
                assert (await client.get("/v1/models")).status_code == 200
        for flags in refused:
            async with before(server, tmp_path, **flags) as served:
                assert not await served.desk.fleet.wait_ready(1.5), flags
        assert len(server.desk.sessions) == 0


async def test_a_session_is_opened_again_with_the_certificates_of_the_day(
    tmp_path: Path, authority: Authority
) -> None:
    """Both sides move to another CA while they run: the session goes on, and the next one, with an
    engine that knows the old CA no more, needs no new frontend."""
    mine = frontend_flags(authority)
    port = free_port()  # bound twice: one that the system chose could be given away in between
    async with (
        engine(engine_port=port, **engine_flags(authority)) as server,
        before(server, tmp_path, **mine) as served,
    ):
        assert await served.desk.fleet.wait_ready(PATIENCE_S)
        (client,) = (one.client for one in served.desk.fleet.members)
        first = client.instance_id
        renewed = Authority(tmp_path / "pki", "ca")  # the same paths
        frontend_flags(renewed)
        flags = engine_flags(renewed)
        await asyncio.sleep(0.1)
        assert client.state == "ready"
        await server.stop()
        again = await EngineServer.start(
            config(engine_port=port, **flags), rank_module="tests.service.fake_core"
        )
        try:
            await until(lambda: client.state == "ready" and client.instance_id != first)
        finally:
            await again.stop()


async def test_every_port_of_an_engine_shows_the_renewed_certificate(
    authority: Authority,
) -> None:
    """Operators' port and the main one, whichever is asked first."""
    flags, context = engine_flags(authority), authority.context()
    del flags["tls_client_ca"]
    async with engine(**flags, admin_port=0) as server:
        ports = (server.port, server.sideline.admin_port)
        before = [await asyncio.to_thread(shown, port, context, NAME) for port in ports]
        authority.sign("engine", NAME)
        after = [await asyncio.to_thread(shown, port, context, NAME) for port in ports]
    assert before[0] == before[1]
    assert after[0] == after[1] != before[0]


async def test_an_engine_with_mtls_answers_probes_on_another_port(authority: Authority) -> None:
    async with (
        engine(**engine_flags(authority), health_port=0) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}") as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        info = engine_pb2_grpc.EngineInfoServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await info.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_client_certificates_without_the_engines_ca_end_the_start(
    authority: Authority,
) -> None:
    flags: dict[str, Any] = {**frontend_flags(authority), "engine_tls_ca": None}
    with pytest.raises(FailedPrecondition, match="--engine-tls-ca"):
        async with frontend_for(1, **flags):
            pass
