"""Requests that no message to an engine holds, and engines that tell much: nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from engine_service.server.launch import EngineServer
from engine_service.server.outlet import StepRows
from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.service.engine_fixtures import FAKE, config, engine, info, session, spec, stubs, unpack
from tests.service.frontends import stack, write_tokenizer
from tests.waiting import http_client, until
from tidemill.client import AsyncClient
from tidemill.runtime.errors import InvalidRequest
from tidemill.v1 import engine_pb2 as pb

SMALL = 64 << 10
LONG = [97] * 20_000
"""Token ids of four bytes each."""


class Served(NamedTuple):
    """Two real engine servers behind a frontend, whose own limits are its flags."""

    frontend: FrontendServer
    engines: list[EngineServer]
    http: httpx.AsyncClient

    def states(self) -> list[str]:
        return [one.state for one in self.frontend.desk.fleet.members]


@asynccontextmanager
async def served(folder: Path, *engines: dict[str, Any], **flags: Any) -> AsyncIterator[Served]:
    write_tokenizer(folder)
    async with AsyncExitStack() as opened:
        found = []
        for own in engines:
            found.append(await EngineServer.start(config(**own), rank_module=FAKE))
            opened.push_async_callback(found[-1].stop)
        addresses = ",".join(f"127.0.0.1:{one.port}" for one in found)
        base = {"engine": addresses, "http_port": 0, "grpc_port": 0, "tokenizer": str(folder)}
        frontend = await FrontendServer.start(FrontendConfig(**base, **flags))
        opened.push_async_callback(frontend.stop)
        url = f"http://127.0.0.1:{frontend.http_port}"
        http = await opened.enter_async_context(http_client(url))
        one = Served(frontend, found, http)
        await until(lambda: one.states() == ["ready"] * len(engines))
        yield one


LIMITS = {
    "engine": ({"max_message_bytes": SMALL}, {}),
    "frontend": ({}, {"max_message_bytes": SMALL}),
}


@pytest.mark.parametrize("whose", LIMITS)
async def test_a_request_that_no_message_holds_is_refused_and_its_neighbours_go_on(
    tmp_path: Path, whose: str
) -> None:
    """gRPC ended the session for it, with all requests there, and so at the next engine."""
    engines, flags = LIMITS[whose]
    async with served(tmp_path, engines, engines, **flags) as one:
        body = {"prompt": [5], "max_tokens": 400}
        neighbours = [
            asyncio.create_task(one.http.post("/v1/completions", json=body)) for _ in range(4)
        ]
        await until(lambda: all(engine.desk.core.num_live for engine in one.engines))
        asked: list[dict[str, Any]] = [
            {"prompt": LONG},
            {"prompt": [5], "regex": "a" * SMALL},
            {"prompt": [[5], LONG], "n": 2},
            {"prompt": LONG, "stream": True},
        ]
        for fields in asked:
            answer = await one.http.post("/v1/completions", json={"max_tokens": 1, **fields})
            assert answer.status_code == 400, answer.text
            told = answer.json()["error"]
            assert told["code"] == "invalid_argument"
            words = f"at most {SMALL} (--max-message-bytes of the {whose})"
            assert words in told["message"], told
        pooled = await one.http.post("/v1/embeddings", json={"input": [LONG], "model": "fake"})
        assert (pooled.status_code, pooled.json()["error"]["code"]) == (400, "invalid_argument")
        async with AsyncClient(f"127.0.0.1:{one.frontend.grpc_port}") as client:
            with pytest.raises(InvalidRequest, match="max-message-bytes"):
                await client.generate("a" * 30_000)
        answers = [await one for one in neighbours]
        assert [answer.status_code for answer in answers] == [200] * 4, answers[0].text
        assert one.states() == ["ready"] * 2
        assert one.frontend.desk.fleet.num_slots == one.frontend.desk.num_live == 0
        nearly = {"prompt": [5], "regex": "a" * (SMALL - 500), "max_tokens": 1}
        fits = await one.http.post("/v1/completions", json=nearly)
        assert fits.status_code == 200, fits.text


async def test_an_engine_of_a_larger_limit_takes_what_another_one_cannot(tmp_path: Path) -> None:
    """A fleet is given its new limit engine by engine."""
    prompt = [97] * 600
    async with served(tmp_path, {"max_message_bytes": 2048}, {}) as one:
        for asked in [prompt] * 4 + [[[5], prompt]]:
            body = {"prompt": asked, "max_tokens": 1}
            answer = await one.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        for _ in range(4):
            body = {"input": [prompt], "model": "fake"}
            pooled = await one.http.post("/v1/embeddings", json=body)
            assert pooled.status_code == 200, pooled.text
        assert one.states() == ["ready"] * 2


async def test_what_an_engine_tells_fits_its_own_limit() -> None:
    """A step that waited for a slow reader, in a session and in a call of its own."""
    rows = StepRows(1, [0], [30_000], bytes(120_000), [], [], [], [])
    async with engine(max_message_bytes=SMALL) as server, stubs(server) as stub:
        async with session(stub) as client:
            (opened,) = server.desk.sessions.values()
            opened.step(rows)
            while len(client.tokens.get(0, ())) < 30_000:
                assert await client.read() is not None
        call = stub.Generate(pb.GenerateRequest(spec=spec(5, max_tokens=30_000)))
        await call.read()
        (route,) = server.desk.core._routes.values()
        route.sink.step(rows)
        num_told = 0
        while num_told < 30_000:
            num_told += unpack((await call.read()).token_ids).count(0)
        call.cancel()


async def test_a_tokenizer_is_told_in_pieces_that_fit(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_bytes(bytes(200_000))
    flags = {"tokenizer": str(tmp_path), "max_message_bytes": SMALL}
    async with engine(**flags) as server, info(server) as stub:
        sizes = [
            len(one.chunk.content) async for one in stub.GetTokenizer(pb.GetTokenizerRequest())
        ]
        assert sum(sizes) > 200_000


async def test_a_frontend_for_small_messages_hears_all_that_engines_say(tmp_path: Path) -> None:
    """Its flag bounds what clients send: a longer step of an engine is no reason to lose it."""
    async with stack(tmp_path, max_message_bytes=4096) as running, running.http() as http:
        body = {"prompt": [97] * 500, "max_tokens": 1, "echo": True, "logprobs": 5}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 501
