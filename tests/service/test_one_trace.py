"""One trace through both services: HTTP, frontend, engine server and core, on every way to end."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.app import FrontendServer
from tests.otlp import Collector, collecting, values_of
from tests.service.engine_fixtures import engine
from tests.service.frontends import byte_tokenizer, frontend_for, stack, write_tokenizer
from tests.service.test_engine_rank import MODEL, real_engine
from tests.waiting import PATIENCE_S, free_port, http_client, until

PARENT = "00f067aa0ba902b7"
FRONTEND, ENGINE = "tidemill-frontend", "tidemill-engine"
SMALL = {
    "executor": "simulated",
    "simulated_step_ms": 10.0,
    "num_pages": 16,
    "page_size": 16,
    "trace_level": 2,
}
"""Two requests of 13 pages each do not fit: one is preempted for the other."""


class Pair:
    """A frontend and a real engine behind it, and a client of the frontend."""

    def __init__(self, frontend: FrontendServer, http: httpx.AsyncClient, engine: Any) -> None:
        self.frontend = frontend
        self.http = http
        self.engine = engine

    async def post(self, trace: int, timeout_ms: int | None = None, **body: Any) -> httpx.Response:
        headers = {"traceparent": f"00-{trace:032x}-{PARENT}-01"}
        if timeout_ms is not None:
            headers["x-request-timeout-ms"] = str(timeout_ms)
        return await self.http.post("/v1/completions", headers=headers, json=body)

    async def leave_early(self, trace: int) -> None:
        """Reads the first event of a stream and goes away, seconds before its end."""
        headers = {"traceparent": f"00-{trace:032x}-{PARENT}-01"}
        body = {"prompt": "a", "max_tokens": 240, "stream": True}
        asked = self.http.build_request("POST", "/v1/completions", headers=headers, json=body)
        answer = await self.http.send(asked, stream=True)
        async for _ in answer.aiter_lines():
            break
        await answer.aclose()
        await until(lambda: not (self.frontend.desk.num_live or self.engine.desk.core.num_live))


@asynccontextmanager
async def pair(folder: Path, endpoint: str | None, **flags: Any) -> AsyncIterator[Pair]:
    write_tokenizer(folder)
    size = byte_tokenizer().get_vocab_size(with_added_tokens=True)
    shape = MODEL | {"vocab_size": size}
    async with (
        real_engine(folder, config_json=shape, otlp_endpoint=endpoint, **flags) as found,
        frontend_for(found.port, otlp_endpoint=endpoint) as frontend,
        http_client(f"http://127.0.0.1:{frontend.http_port}") as http,
    ):
        await until(lambda: frontend.desk.state == "ready")
        yield Pair(frontend, http, found)


def check_walk(collector: Collector, trace: int) -> tuple[Any, Any, list[Any]]:
    """Parents from the ingress down; returns the CLIENT span, the engine's one, and its phases.

    Of several choices, it is the one that was preempted or the first.
    """
    spans = collector.of_trace(f"{trace:032x}")
    services = collector.services
    (ingress,) = (span for span in spans if span.parent_span_id.hex() == PARENT)
    assert (ingress.name, services[ingress.span_id]) == ("POST /v1/completions", FRONTEND)
    (client,) = (span for span in spans if span.kind == 3)
    assert client.parent_span_id == ingress.span_id
    roots = [span for span in spans if span.name == "tidemill.v1.EngineService/Generate"]
    phases: list[Any] = []
    for root in roots:
        assert root.parent_span_id == client.span_id
        assert services[root.span_id] == ENGINE
        assert root.start_time_unix_nano >= client.start_time_unix_nano
        of_root = [span for span in spans if span.parent_span_id == root.span_id]
        assert all(services[span.span_id] == ENGINE for span in of_root)
        for phase in of_root:
            assert root.start_time_unix_nano <= phase.start_time_unix_nano
            assert phase.end_time_unix_nano <= root.end_time_unix_nano
        phases += of_root
    known = {span.span_id for span in spans}
    strays = [s.name for s in spans if s is not ingress and s.parent_span_id not in known]
    assert strays == []
    return client, roots[0], phases


async def test_every_way_to_end_is_one_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    success, gone, refused, late, preempted = range(0xA1, 0xA6)
    caplog.set_level(logging.DEBUG, "tidemill")
    with collecting() as (collector, endpoint):
        async with pair(tmp_path, endpoint, **SMALL) as served:
            assert (await served.post(success, prompt="ab", max_tokens=4)).status_code == 200
            await served.leave_early(gone)
            schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
            answer = await served.post(refused, prompt="ab", max_tokens=4, response_format=schema)
            assert answer.status_code >= 400
            answer = await served.post(late, 1000, prompt="ab", max_tokens=200)
            assert answer.status_code == 504
            assert (await served.post(preempted, prompt="ab", max_tokens=200, n=2)).is_success
            steps = await served.http.get("/metrics", headers={"accept": OPEN_METRICS})
            await until(lambda: served.engine.desk.core.num_live == 0)
    wanted = {
        success: (None, None, {"engine.queue", "engine.prefill", "engine.decode"}),
        gone: ("aborted", "CANCELLED", {"engine.queue", "engine.prefill", "engine.decode"}),
        refused: ("not", "UNSUPPORTED", set()),
        late: ("did not finish", "DEADLINE_EXCEEDED", {"engine.queue"}),
        preempted: (None, None, {"engine.queue", "engine.preempted"}),
    }
    for trace, (text, error_type, names) in wanted.items():
        client, root, phases = check_walk(collector, trace)
        (ingress,) = (one for one in collector.spans if one.span_id == client.parent_span_id)
        assert (ingress.status.code == 2) is (trace in (gone, late)), "400 is no error of a server"
        assert names <= {phase.name for phase in phases}, trace
        found = values_of(root)
        assert found.get("error.type") == error_type, found
        assert (root.status.code == 2) is (text is not None)
        assert (client.status.code == 2) is (text is not None)
        assert (text or "") in client.status.message
        assert ("error.type" in values_of(client)) is (text is not None)
    assert values_of(check_walk(collector, success)[1])["rpc.response.status_code"] == "OK"
    check_steps(collector, success)
    assert re.search(r'# \{.*trace_id="0{30}a[1-5]"', steps.text), "no exemplar"
    check_log(caplog, f"{success:032x}")


OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def check_steps(collector: Collector, trace: int) -> None:
    """Steps are traces of their own, linked to the requests they worked for."""
    _, root, _ = check_walk(collector, trace)
    steps = [span for span in collector.spans if span.name == "engine.step"]
    mine = [step for step in steps if root.span_id in {link.span_id for link in step.links}]
    assert 3 <= len(mine) <= 6, "a prompt and three more tokens, and a step that is in flight"
    for step in mine:
        (forward,) = (span for span in collector.spans if span.parent_span_id == step.span_id)
        assert forward.name == "tp.forward"
        assert step.start_time_unix_nano <= forward.start_time_unix_nano
        assert forward.end_time_unix_nano <= step.end_time_unix_nano
        assert values_of(step)["tidemill.rows"] == 1


def check_log(caplog: pytest.LogCaptureFixture, trace_id: str) -> None:
    lines = [line for line in caplog.records if getattr(line, "trace_id", "") == trace_id]
    assert {"tidemill.frontend.request", "tidemill.engine.request"} <= {one.name for one in lines}
    assert all(len(line.__dict__["span_id"]) == 16 for line in lines)


@pytest.mark.parametrize("collector", ["absent", "silent"])
async def test_a_collector_that_is_away_or_silent_blocks_nothing(
    tmp_path: Path, collector: str
) -> None:
    """An export on the event loop would take 3 s for each of a request's five spans."""
    with collecting(answers=False) as (found, endpoint):
        target = endpoint if collector == "silent" else "http://127.0.0.1:9"
        async with stack(tmp_path, otlp_endpoint=target) as served, served.http() as http:
            body = {"prompt": "ab", "max_tokens": 3}
            began = time.monotonic()
            for _ in range(60):
                assert (await http.post("/v1/completions", json=body)).status_code == 200
            assert time.monotonic() - began < PATIENCE_S
            await until(lambda: collector == "absent" or found.num_calls > 0)
            began = time.monotonic()
        assert time.monotonic() - began < PATIENCE_S / 2, "the end waited for the collector"


async def post_traced(http: httpx.AsyncClient, trace: int, **body: Any) -> None:
    """With a cache of its own: each prompt is computed."""
    header = {"traceparent": f"00-{trace:032x}-{PARENT}-01"}
    asked = {"ignore_eos": True, "cache_salt": str(trace), **body}
    answer = await http.post("/v1/completions", json=asked, headers=header)
    assert answer.status_code == 200, answer.text


async def test_blocks_and_chunks_of_a_diffusion_request(tmp_path: Path) -> None:
    """A prompt of two chunks; at level 3 every block has a span, below it an event."""
    built_in = {"model": "demo-block", "load_format": "auto", "max_model_len": 128}
    with collecting() as (collector, endpoint):
        async with (
            real_engine(tmp_path, **built_in, token_budget=64, otlp_endpoint=endpoint) as server,
            frontend_for(server.port) as frontend,
            http_client(f"http://127.0.0.1:{frontend.http_port}") as http,
        ):
            await until(lambda: frontend.desk.state == "ready")
            for level in (1, 3):
                server.desk.observer.set_trace_level(level)
                prompt = "To be or not to be. " * 4
                await post_traced(http, level, prompt=prompt, max_tokens=40)
    for level in (1, 3):
        found = collector.of_trace(f"{level:032x}")
        spans = {span.name: span for span in found}
        blocks = [span for span in found if span.name == "engine.block"]
        num_blocks = values_of(spans["tidemill.v1.EngineService/Generate"])["tidemill.blocks"]
        denoise, prefill = spans["engine.denoise"], spans["engine.prefill"]
        assert prefill.end_time_unix_nano <= denoise.start_time_unix_nano
        assert [event.name for event in prefill.events] == ["chunk"] * len(prefill.events)
        assert prefill.events
        if level == 3:
            assert len(blocks) == num_blocks
            assert {span.parent_span_id for span in blocks} == {denoise.span_id}
            assert sum(values_of(span)["tidemill.tokens"] for span in blocks) == 40
        else:
            assert blocks == []
            assert [event.name for event in denoise.events] == ["block"] * num_blocks


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (
            "demo-block",
            (
                ({"threshold": 0.5}, False, 0),
                ({"threshold": 0.5, "edit_threshold": 0.0}, True, 0),
            ),
        ),
        (
            "demo-canvas",
            (
                ({"cache": "none", "block_length": 16}, False, 0),
                ({"cache": "dual", "block_length": 16}, False, 3),
            ),
        ),
    ],
)
async def test_what_a_diffusion_request_took_back_and_computed_anew(
    tmp_path: Path, model: str, asked: tuple[tuple[dict[str, Any], bool, int], ...]
) -> None:
    """Tokens that gave way to others, and refreshes of an approximate cache: one a block."""
    built_in = {"model": model, "load_format": "auto", "max_model_len": 128}
    with collecting() as (collector, endpoint):
        async with (
            real_engine(tmp_path, **built_in, otlp_endpoint=endpoint) as server,
            frontend_for(server.port) as frontend,
            http_client(f"http://127.0.0.1:{frontend.http_port}") as http,
        ):
            await until(lambda: frontend.desk.state == "ready")
            for trace, (params, *_) in enumerate(asked, 1):
                body = {"prompt": [65] * 16, "max_tokens": 48, "seed": 1}
                await post_traced(http, trace, **body, decoding={"params": params})
    roots = [span for span in collector.spans if span.name.endswith("/Generate")]
    assert len(roots) == len(asked)
    roots.sort(key=lambda root: root.trace_id)
    for root, (_, remasks, refreshes) in zip(roots, asked, strict=True):
        found = values_of(root)
        assert (found["tidemill.remasks"] > 0) is remasks, found
        assert found["tidemill.cache_refreshes"] == refreshes


async def test_the_trace_level_changes_while_it_runs(tmp_path: Path) -> None:
    """0: nothing; and steps are traced for nobody's sake, every so many."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with collecting() as (collector, endpoint):
        flags = {"executor": "simulated", "simulated_step_ms": 1.0, "trace_step_every": 10}
        async with pair(tmp_path, endpoint, **flags) as served:
            observer = served.engine.desk.observer
            await served.post(1, prompt="ab", max_tokens=100)
            observer.set_trace_level(0)
            assert (await served.post(2, prompt="ab", max_tokens=100)).is_success
            observer.set_trace_level(3)
            await served.post(3, prompt="ab", max_tokens=20)
    engine_spans = [s for s in collector.spans if collector.services[s.span_id] == ENGINE]
    assert {span.trace_id.hex() for span in engine_spans if span.kind == 2} == {
        f"{1:032x}",
        f"{3:032x}",
    }
    steps = [values_of(span) for span in engine_spans if span.name == "engine.step"]
    linked = [s for s in engine_spans if s.name == "engine.step" and s.links]
    assert 8 <= sum(step["tidemill.step"] % 10 == 0 for step in steps) <= 25
    assert 18 <= len(linked) <= 24


async def test_an_unknown_trace_level_is_refused() -> None:
    async with engine() as server:
        with pytest.raises(Exception, match="trace level 4 does not exist"):
            server.desk.observer.set_trace_level(4)
        assert server.desk.observer.trace_level == 1


async def test_a_path_without_a_route_names_no_span() -> None:
    """Attributes that OpenTelemetry's conventions require are there, those of a route are not."""
    with collecting() as (collector, endpoint):
        async with (
            frontend_for(free_port(), otlp_endpoint=endpoint) as frontend,
            http_client(f"http://127.0.0.1:{frontend.http_port}") as http,
        ):
            assert (await http.post("/v1/7")).status_code == 404
        (span,) = collector.spans
        scheme_and_path = {"url.scheme": "http", "url.path": "/v1/7"}
        asked = {"http.request.method": "POST", "http.response.status_code": 404}
        assert (span.name, values_of(span)) == ("POST", asked | scheme_and_path)
