"""What is seen of requests that an engine refuses before they are sequences of its core."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import pytest

from engine_service.server.metrics_port import MetricsPort
from tests.otlp import collecting, values_of
from tests.service.engine_fixtures import engine, info, rest, session, spec, stubs
from tests.waiting import http_client, until
from tidemill.v1 import engine_pb2 as pb

ABOVE = "00f067aa0ba902b7"
GENERATE, POOL = "tidemill.v1.EngineService/Generate", "tidemill.v1.EngineService/Pool"


def above(trace: int) -> str:
    return f"00-{trace:032x}-{ABOVE}-01"


async def code_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return str(refused.value.code().name)


async def test_bad_input_is_counted_and_traced_like_every_other_end() -> None:
    with collecting() as (collector, endpoint):
        async with (
            engine(metrics_port=0, otlp_endpoint=endpoint) as server,
            stubs(server) as stub,
            session(stub) as client,
            http_client(f"http://127.0.0.1:{server.metrics_port}") as http,
        ):
            bad = spec(1, 2, traceparent=above(1))
            bad.prompt_token_ids += b"x"
            request = pb.GenerateRequest(spec=bad)
            assert await code_of(rest(stub.Generate(request))) == "INVALID_ARGUMENT"
            bad.traceparent = above(2)
            await client.send(submit=pb.Submit(handle=1, spec=bad))
            await client.drain(1)
            asked = pb.PoolRequest(request_id="i" * 300, traceparent=above(3))
            assert await code_of(stub.Pool(asked)) == "INVALID_ARGUMENT"
            page = (await http.get("/metrics")).text
    for trace, name in ((1, GENERATE), (2, GENERATE), (3, POOL)):
        (span,) = collector.of_trace(f"{trace:032x}")
        assert (span.name, span.parent_span_id.hex(), span.status.code) == (name, ABOVE, 2)
        found = values_of(span)
        assert found["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert found["error.type"] == "INVALID_ARGUMENT"
    counted = 'tidemill_admission_rejections_total{model_name="fake",reason="invalid_argument"} 3.0'
    assert counted in page


async def test_refusals_of_the_core_are_no_errors_of_the_engine() -> None:
    """Its health said error=3 behind three requests without a prompt."""
    async with (
        engine(metrics_port=0) as server,
        stubs(server) as stub,
        http_client(f"http://127.0.0.1:{server.metrics_port}") as http,
    ):
        wrong = spec()
        assert (await http.get("/health")).json()["detail"] == "no request has ended yet"
        for _ in range(3):
            assert await code_of(rest(stub.Generate(pb.GenerateRequest(spec=wrong)))) != "INTERNAL"
        await until(lambda: "=3" in server.desk.board.snapshot.detail)
        assert (await http.get("/health")).json()["detail"] == "finished: refused=3"


async def test_who_is_cut_short_was_not_refused() -> None:
    async with (
        engine(metrics_port=0, drain_timeout_s=0.1) as server,
        stubs(server) as stub,
        http_client(f"http://127.0.0.1:{server.metrics_port}") as http,
    ):
        call = stub.Generate(pb.GenerateRequest(spec=spec(1, max_tokens=30_000)))
        await call.read()
        await server.drain()
        page = (await http.get("/metrics")).text
    failed = 'tidemill_request_failure_total{error_type="drain_timeout",model_name="fake"} 1.0'
    assert failed in page
    assert "tidemill_admission_rejections_total{" not in page


async def test_rpcs_are_timed_by_how_they_ended() -> None:
    async with (
        engine(metrics_port=0) as server,
        stubs(server) as stub,
        info(server),
        http_client(f"http://127.0.0.1:{server.metrics_port}") as http,
    ):
        await rest(stub.Generate(pb.GenerateRequest(spec=spec(5, 6))))
        page = (await http.get("/metrics")).text
    assert (
        f'rpc_server_call_duration_seconds_count{{rpc_method="{GENERATE}",'
        'rpc_response_status_code="OK"} 1.0'
    ) in page


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_the_metrics_port_listens_on_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks no resolver for the machine's name, which may take seconds."""
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getfqdn", lambda *name: asked.append(name) or "")
    for host in ("::1", "127.0.0.1"):
        port = MetricsPort(host, 0, {"/x": lambda accept: (200, b"hello", "text/plain")})
        try:
            async with http_client(f"http://[{host}]" if ":" in host else f"http://{host}") as http:
                place = http.base_url.copy_with(port=port.port, path="/x")
                assert (await http.get(place)).text == "hello"
        finally:
            port.close()
    assert asked == []
