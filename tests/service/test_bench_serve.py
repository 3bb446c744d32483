"""`bench serve` against running servers: a real frontend, and a stranger with the same API."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_service.config import EngineConfig
from tests.certificates import Authority
from tests.service.frontends import Stack, stack
from tests.waiting import free_port
from tidemill.bench import serve
from tidemill.bench.serve import ServeOptions, table
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unavailable
from tidemill.runtime.errors import Overloaded as Full
from tidemill.runtime.options import Secret


def url_of(served: Stack, protocol: str) -> str:
    return served.url if protocol == "http" else f"http://{served.grpc_address}"


async def bench(url: str, **fields: Any) -> dict[str, Any]:
    """The results of a short run, beside the servers of this event loop."""
    short = {
        "warm_up_s": 0.25,
        "seconds": 1.5,
        "input_len": 12,
        "output_len": 12,
        "vocab_size": 128,
    } | fields
    return await asyncio.to_thread(serve.run, ServeOptions(url=url, **short), EngineConfig())


def check_figures(point: dict[str, Any], step_s: float, other_s: float) -> None:
    """Of three streams of an engine whose step takes `step_s`, and not `other_s`."""
    assert point["requests"] >= 3
    pace_ms = point["tpot_ms"]["p50"]
    # Less than a step where the first chunk comes late; and a chat's echo begins with a special
    # token, which is counted and has no text.
    assert 0.8e3 * step_s <= pace_ms < 2e3 * step_s
    assert not 0.8e3 * other_s <= pace_ms < 2e3 * other_s
    assert point["e2e_ms"]["p50"] == pytest.approx(12 * pace_ms, rel=0.3)
    assert point["itl_ms"]["p50"] == pytest.approx(pace_ms * point["tokens_per_chunk"], rel=0.5)
    assert point["output_tokens_per_s"] == pytest.approx(3 / pace_ms * 1e3, rel=0.35)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_figures_follow_the_step_of_the_engine(
    tmp_path: Path, protocol: str, api: str
) -> None:
    """A step of 30 ms gives a token, and one of 90 ms: no figure of the one fits the other."""
    async with stack(tmp_path) as served:
        options = {"protocol": protocol, "api": api, "concurrency": "3"}
        for step_s, other_s in ((0.03, 0.09), (0.09, 0.03)):
            served.engine.step_s = step_s
            # Half a second that another program takes is no figure of ours; a wrong formula is
            # wrong every time.
            for attempt in reversed(range(5)):
                (point,) = (await bench(url_of(served, protocol), **options))["points"]
                assert point["failures"] == {}
                assert point["ok"] == point["requests"]
                serve.check({"points": [point]})
                try:
                    check_figures(point, step_s, other_s)
                    break
                except (AssertionError, KeyError):  # there is no median of nothing
                    if not attempt:
                        raise
        sent = served.engine.submits
        assert {one.sampling.max_tokens for one in sent} == {12}
        if api == "completions":
            assert {len(one.prompt_token_ids) for one in sent} == {4 * 12}


async def test_an_open_loop_goes_on_while_the_server_stands_still(tmp_path: Path) -> None:
    """Every request of a second in which nothing is answered began in time, and waited."""
    for attempt in reversed(range(5)):  # a machine that stands still as well begins none in time
        async with stack(tmp_path / str(attempt)) as served:
            results, stood_s = await stood(served)
        try:
            check_open_loop(results, stood_s)
            break
        except AssertionError:
            if not attempt:
                raise


async def stood(served: Stack) -> tuple[dict[str, Any], float]:
    """The results of an open loop, and for how long nothing was answered."""
    served.engine.hold = True
    running = asyncio.create_task(
        bench(served.url, rate="20", arrival_cv=0.0, output_len=4, warm_up_s=0.0)
    )
    while not served.engine.submits:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    first = time.monotonic()
    while len(served.engine.submits) < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    stood_s = time.monotonic() - first
    served.engine.hold = False
    return await running, stood_s


def check_open_loop(results: dict[str, Any], stood_s: float) -> None:
    (point,) = results["points"]
    assert point["ok"] == point["requests"] in (29, 30, 31)
    assert point["begun_per_s"] == pytest.approx(20, rel=0.05)
    longest_ms = max(point["ttft_ms"].values())
    assert longest_ms >= 0.8e3 * stood_s, "the first waited for as long as the server stood still"
    assert point["ttft_ms"]["p50"] < longest_ms / 1.2, "the last did not"
    assert results["options"]["rate"] == "20"


@pytest.mark.parametrize(("protocol", "status"), [("http", "429"), ("grpc", "RESOURCE_EXHAUSTED")])
async def test_refusals_are_counted_apart(tmp_path: Path, protocol: str, status: str) -> None:
    async with stack(tmp_path) as served:
        served.engine.refuse = Full("no room", retry_after_ms=1000)
        url = url_of(served, protocol)
        results = await bench(url, protocol=protocol, rate="20,40", slo_e2e_ms=1e6, seconds=1.0)
        (flood,) = (await bench(url, protocol=protocol, concurrency="2", seconds=3.0))["points"]
    assert 2 <= flood["requests"] <= 62, "two streams, each with a tenth of a second's rest"
    for point in results["points"]:
        assert point["failures"][status]["requests"] == point["requests"] > 5
        assert "no room" in point["failures"][status]["said"]
        assert point["refused"]["requests"] == point["requests"]
        assert (point["ok"], point["goodput_per_s"]) == (0, 0)
    lines = dict(table(results))
    assert "no room" in lines[f"  failed: {status}"]
    assert "answered/s" in lines["requests per second"]


async def test_a_refused_connection_moves_to_the_next_address(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        dead = f"http://127.0.0.1:{free_port()}"
        found = await bench(f"{served.url},{dead}", concurrency="2", output_len=2)
        (point,) = found["points"]
        assert point["ok"] == point["requests"] > 4
        assert point["moved"] == pytest.approx(point["requests"] / 2, abs=3)
        grpc_urls = f"http://{served.grpc_address},{dead}"
        found = await bench(grpc_urls, protocol="grpc", concurrency="2", output_len=2)
        (point,) = found["points"]
        assert point["ok"] == point["requests"] > 4
        assert point["moved"] > 0
    for protocol in ("http", "grpc"):
        with pytest.raises(Unavailable):
            await bench(dead, protocol=protocol)


async def test_a_trace_brings_its_own_prompts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"t_s": 0.05 * n, "messages": [{"role": "user", "content": f"n{n}"}]} for n in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    async with stack(tmp_path / "engine") as served:
        options = {"trace_file": str(path), "api": "chat", "seconds": None, "warm_up_s": 0.0}
        results = await bench(served.url, clients=2, output_len=3, **options)
        read = {served.tokenizer.decode(_ids(one)) for one in served.engine.submits}
    assert results["points"][0]["ok"] == 9
    assert len(read) == 9
    assert all("n" in text for text in read)


def _ids(spec: Any) -> list[int]:
    packed = spec.prompt_token_ids
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


async def test_a_request_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        served.engine.hold = True
        for protocol, status in (("http", "timeout"), ("grpc", "DEADLINE_EXCEEDED")):
            found = await bench(
                url_of(served, protocol), protocol=protocol, rate="10", seconds=0.5, timeout_s=0.5
            )
            (point,) = found["points"]
            assert point["ok"] == 0
            assert point["failures"].keys() <= {status, "timeout"}
            with pytest.raises(Unavailable, match=r"none of \d+ requests was answered: "):
                serve.check(found)


CHUNK = b'data: {"choices":[{"index":0,"text":" tide"}]}\n\n'


@asynccontextmanager
async def stranger(tls: ssl.SSLContext | None, heads: list[bytes]) -> AsyncIterator[int]:
    """A server of another make: every answer ends with its connection and tells no usage."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(head)
        if b"Bearer right" not in head:
            writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 5\r\n\r\nno go")
        elif head.startswith(b"GET /v1/models"):
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
            writer.write(b'{"data":[{"id":"theirs"}]}')
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
            for _ in range(3):
                writer.write(CHUNK)
                await writer.drain()
                await asyncio.sleep(0.05)
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_another_server_with_a_key_and_a_certificate(tmp_path: Path) -> None:
    authority, other = (Authority(tmp_path, name) for name in ("ca", "other"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.sign("server"))
    heads: list[bytes] = []
    async with stranger(context, heads) as port:
        url = f"https://localhost:{port}/v1"
        asked: dict[str, Any] = {"concurrency": "2", "output_len": 3, "input_len": 2}
        trusting = asked | {"tls_ca": authority.path, "seconds": 4.0}
        results = await bench(url, api_key=Secret("right"), **trusting)
        with pytest.raises(InvalidRequest, match="answered 401: no go"):
            await bench(url, api_key=Secret("wrong"), **trusting)
        with pytest.raises(ServiceError, match="CERTIFICATE_VERIFY_FAILED"):
            await bench(url, api_key=Secret("right"), **asked, tls_ca=other.path)
    (point,) = results["points"]
    assert point["ok"] == point["requests"] > 4
    assert results["model"] == "theirs"
    assert point["tokens_per_chunk"] == 1
    assert point["tpot_ms"]["p50"] == pytest.approx(50, rel=0.5)
    assert heads[1].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert "right" not in json.dumps(results)


async def test_keys_and_mutual_tls_of_a_frontend(tmp_path: Path) -> None:
    """Both faces; who shows no certificate, or another key, is told so before any load."""
    authority = Authority(tmp_path / "pki", "ca")
    server, own = authority.sign("server"), authority.sign("client")
    flags = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.path}
    async with stack(tmp_path, **flags, api_key=Secret("open sesame")) as served:
        shown = {"tls_ca": authority.path, "client_cert": own.cert, "client_key": own.key}
        asked: dict[str, Any] = {"concurrency": "2", "output_len": 3}
        for protocol in ("http", "grpc"):
            url = url_of(served, protocol).replace("http:", "https:")
            asked["protocol"] = protocol
            found = await bench(url, api_key=Secret("open sesame"), **asked, **shown)
            (point,) = found["points"]
            assert point["ok"] == point["requests"] > 4
            with pytest.raises(ServiceError, match=r"401|key"):
                await bench(url, api_key=Secret("sesame"), **asked, **shown)
            with pytest.raises(ServiceError, match=r"cannot reach|connect"):
                await bench(url, api_key=Secret("open sesame"), **asked, tls_ca=authority.path)
