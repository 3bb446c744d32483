"""Requests go where the beginning of their prompt is cached, as the engines' events tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.service.fake_engine import FakeEngine, pack
from tests.service.frontends import make_engine
from tests.waiting import http_client, until
from tidemill.runtime.rpc import server_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

PAGE = 4
LONG = list(range(65, 65 + 4 * PAGE))


def stored(*token_ids: int, parent: bytes = b"", name: str = "") -> pb.KvEvent:
    """Pages of a sequence, named by their number and `name`."""
    hashes = [f"{name}{number}".encode() for number in range(len(token_ids) // PAGE)]
    pages = pb.PagesStored(
        page_hashes=hashes, parent_hash=parent, token_ids=pack(list(token_ids)), page_size=PAGE
    )
    return pb.KvEvent(stored=pages)


@dataclass
class Feed(rpc.KvEventServiceServicer):
    """What an engine tells; `starts` are the numbers that subscribers asked for."""

    starts: list[int] = field(default_factory=list)
    told: asyncio.Queue[pb.SubscribeResponse] = field(default_factory=asyncio.Queue)
    num_told: int = 0

    async def Subscribe(self, request: Any, context: Any) -> None:
        self.starts.append(request.start_seq)
        while True:
            answer = await self.told.get()
            await context.write(answer)
            self.num_told += 1


@dataclass
class Served:
    frontend: FrontendServer
    engines: list[FakeEngine]
    feeds: list[Feed]

    async def tell(self, number: int, *events: pb.KvEvent, **fields: Any) -> None:
        """A batch of an engine, and waits until the frontend has taken it in."""
        feed, prefixes = self.feeds[number], self.frontend.desk.fleet.prefixes
        assert prefixes is not None
        before = feed.num_told
        feed.told.put_nowait(pb.SubscribeResponse(events=events, **fields))
        await until(lambda: feed.num_told == before + 1)

    async def place(self, client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> int:
        """The engine that a prompt goes to."""
        before = [len(engine.submits) for engine in self.engines]
        body = {"prompt": prompt, "max_tokens": 2, **fields}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        counts = [len(engine.submits) for engine in self.engines]
        (place,) = [n for n, (old, new) in enumerate(zip(before, counts, strict=True)) if new > old]
        return place

    async def until_place(self, client: httpx.AsyncClient, prompt: list[int], *wanted: int) -> None:
        """Until as many requests in a row go to the engines `wanted`, in any order."""
        async with asyncio.timeout(60):
            while True:
                found = {await self.place(client, prompt) for _ in range(4)}
                if found == set(wanted):
                    return


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    """Three engines; the last one does not tell what it caches."""
    async with AsyncExitStack() as opened:
        engines = [make_engine(folder, instance_id=f"fake-{n}")[0] for n in range(3)]
        feeds, ports = [Feed(), Feed()], []
        for engine, feed in zip(engines, [*feeds, None], strict=True):
            server = grpc.aio.server(options=server_options(64 << 20))
            rpc.add_EngineServiceServicer_to_server(engine, server)
            rpc.add_EngineInfoServiceServicer_to_server(engine, server)
            if feed is not None:
                rpc.add_KvEventServiceServicer_to_server(feed, server)
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            opened.push_async_callback(server.stop, 0)
        where = ",".join(f"127.0.0.1:{port}" for port in ports)
        config = FrontendConfig(engine=where, routing="prefix_affinity", http_port=0, grpc_port=0)
        frontend = await FrontendServer.start(config)
        opened.push_async_callback(frontend.stop)
        await until(lambda: frontend.desk.fleet.num_open == 3)
        await until(lambda: all(feed.starts for feed in feeds))
        yield Served(frontend, engines, feeds)


async def test_prompts_follow_their_pages(tmp_path: Path) -> None:
    async with served(tmp_path) as site:
        url = f"http://127.0.0.1:{site.frontend.http_port}"
        async with http_client(url) as client:
            await site.until_place(client, LONG, 0, 1, 2)  # control: nothing is known
            await site.tell(1, stored(*LONG[:8]), seq=5, gap=True, snapshot=True)
            await site.until_place(client, LONG, 1)
            await site.tell(0, stored(*LONG), seq=9, gap=True, snapshot=True)
            await site.until_place(client, LONG, 0)
            await site.until_place(client, [*LONG[:8], 1, 2, 3, 4], 0, 1)
            await site.until_place(client, [1, 2, 3, *LONG], 0, 1, 2)
            removed = pb.PagesRemoved(page_hashes=[b"1", b"2", b"3"])
            await site.tell(0, pb.KvEvent(removed=removed), seq=10)
            await site.until_place(client, LONG, 1)
            await site.tell(1, pb.KvEvent(cleared=pb.CacheCleared()), seq=6)
            await site.until_place(client, LONG, 0)


@pytest.mark.parametrize("wrong", ["no tokens", "too few tokens", "too many tokens"])
async def test_wrong_pages_of_one_engine_are_its_own_matter(tmp_path: Path, wrong: str) -> None:
    """A page of no tokens was an internal error of every request, to whichever engine it went."""
    told = stored(*LONG)
    if wrong == "no tokens":
        told.stored.page_size = 0
    else:
        told.stored.token_ids = pack(LONG[:-1] if wrong == "too few tokens" else [*LONG, 1])
    async with served(tmp_path) as site:
        await site.tell(0, stored(*LONG[:4]), seq=4, gap=True)
        await site.tell(1, stored(*LONG[:8]), seq=5, gap=True)
        url = f"http://127.0.0.1:{site.frontend.http_port}"
        async with http_client(url) as client:
            await site.until_place(client, LONG, 1)
            await site.tell(0, told, seq=5)
            removed = pb.PagesRemoved(page_hashes=[b"0", b"1"])
            await site.until_place(client, LONG, 1)
            await site.tell(1, pb.KvEvent(removed=removed), seq=6)
            await site.until_place(client, LONG, 0, 1, 2)


async def test_who_comes_back_goes_on_where_it_was(tmp_path: Path) -> None:
    async with served(tmp_path) as site:
        assert [feed.starts for feed in site.feeds] == [[0], [0]]
        await site.tell(0, stored(*LONG), seq=7, gap=True, snapshot=True)
        await site.tell(0, stored(*LONG[:4], name="other"), seq=8)
        await site.tell(1, stored(*LONG[:4]), seq=3, gap=True, snapshot=True)
        url = f"http://127.0.0.1:{site.frontend.http_port}"
        async with http_client(url) as client:
            await site.until_place(client, LONG, 0)
            prefixes = site.frontend.desk.fleet.prefixes
            assert prefixes is not None
            await until(lambda: ("fake-0", 8) in prefixes._seen.values())
            for engine in site.engines[:2]:
                engine.drop_sessions()
            await until(lambda: all(len(feed.starts) == 2 for feed in site.feeds))
            assert site.feeds[0].starts[1] == 9
            assert site.feeds[1].starts[1] == 0, "a snapshot that may have been half of one"
            await site.until_place(client, LONG, 0)
            site.engines[0].instance_id = "another process"
            site.engines[0].drop_sessions()
            await until(lambda: len(site.feeds[0].starts) == 3)
            assert site.feeds[0].starts[2] == 0
            await site.until_place(client, LONG, 1)
