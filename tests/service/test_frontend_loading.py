"""While no engine is up, every route that needs one says so: 503 and when to come back. Once one
is, probes and counters know."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.service.frontends import frontend_for, stack
from tests.waiting import free_port, http_client, until

TEXT: dict[str, Any] = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/messages": CHAT | {"max_tokens": 1, "model": "x"},
    "/v1/messages/count_tokens": CHAT | {"model": "x"},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/generate": TEXT,
    "/v1/generate_batch": {"prompts": ["a"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/ping": {},
    "/classify": {"input": "a"},
    "/v1/classify": {"input": "a"},
    "/tokenize": TEXT,
    "/detokenize": {"tokens": [1]},
}
WITHOUT_ENGINE = {
    "/", "/metrics", "/version", "/health/live", "/v2/health/live", "/v2", "/openapi.json",
    "/ui/model", "/ui/pieces", "/load",
}  # fmt: skip
"""They tell what the frontend knows by itself, or are pages and their files."""


async def test_503_with_retry_after_on_all_routes() -> None:
    async with (
        frontend_for(free_port()) as frontend,
        http_client(f"http://127.0.0.1:{frontend.http_port}") as http,
    ):
        told: dict[str, list[str]] = {"post": [], "get": []}
        for path, methods in (await http.get("/openapi.json")).json()["paths"].items():
            if "{" not in path and path not in WITHOUT_ENGINE:
                for verb in told:
                    told[verb] += [path] * (verb in methods)
        assert set(told["post"]) == set(ASKED), "a route is not asked here"
        assert {"/v1/models", "/health", "/health/ready", "/v1/health"} <= set(told["get"])
        for path, body in ASKED.items():
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), path
        for path in told["get"]:
            answer = await http.get(path)
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), path
        assert (await http.get("/v1/models/x")).status_code == 503
        for path in ("/metrics", "/health/live", "/version"):
            assert (await http.get(path)).status_code == 200, path


async def test_other_servers_names_for_ready_and_busy(tmp_path: Path) -> None:
    """Platforms that know vLLM ask them; a request is counted until its last byte has gone."""
    async with stack(tmp_path, engine={"hold_after": 1}) as served, served.http() as http:
        assert {(await http.request(m, "/ping")).status_code for m in ("GET", "POST")} == {200}
        assert (await http.get("/load")).json() == {"server_load": 0}
        body = {"prompt": "ab", "max_tokens": 4}
        running = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: served.frontend.desk.num_live == 2)
        assert (await http.get("/load")).json() == {"server_load": 2}
        served.engine.hold_after = None
        assert [(await one).status_code for one in running] == [200, 200]
        assert (await http.get("/load")).json() == {"server_load": 0}
