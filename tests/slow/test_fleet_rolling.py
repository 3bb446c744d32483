"""Everything is restarted, one after the other, while clients go on asking: nobody fails."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.e2e.real_stack import HOST
from tests.slow.fleets import Client, Site, Stream, prompts, site, up
from tests.waiting import PATIENCE_S, free_port

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]  # many processes

NUM_CLIENTS, NUM_TOKENS = 24, 20
MOST_KILLS = 5
UNHEARD = (grpc.StatusCode.CANCELLED, "CANCELLED")
FLAGS = ("--max-rows=16", "--simulated-step-ms=50")


class Load:
    """Clients that ask one request after the other, over HTTP on a connection each and over gRPC on
    one that is kept, of all frontends in turn that are `known`. Nobody tells them of a drain.

    Who is refused asks the other frontend, once: over HTTP a connection that cannot be made, over
    gRPC a call that is UNAVAILABLE without a token. Everything else that is no right answer is a
    failure; but a call that came when its server stopped may be ended by grpc itself, before any
    handler of ours was told of it, and with CANCELLED (grpc/grpc#41785): `num_unheard` of those.
    """

    def __init__(self, fronts: list[int], texts: list[Client]) -> None:
        self._faces = {
            port: [partial(self._over_http, port), partial(self._over_grpc, client)]
            for port, client in zip(fronts, texts, strict=True)
        }
        self.known = list(fronts)
        self._numbers = itertools.count()
        self._whole: dict[tuple[int, ...], list[int]] = {}
        self.num_answered = 0
        self.num_moved = 0
        self.num_unheard = 0
        self.failures: Counter[str] = Counter()

    async def one(self) -> None:
        """Asks once, and judges the answer."""
        number = next(self._numbers)
        prompt = prompts(NUM_CLIENTS)[number % NUM_CLIENTS]
        ask, again = (
            self._faces[self.known[turn % len(self.known)]][number // 2 % 2]
            for turn in (number, number + 1)
        )
        try:
            tokens = await ask(prompt)
            if tokens is None:
                self.num_moved += 1
                tokens = await again(prompt)
        except Exception as failure:
            self.failures[f"{type(failure).__name__}: {failure}"] += 1
            return
        if tokens is None:
            self.failures["refused by both"] += 1
        elif tokens != self._whole.setdefault(prompt, tokens) or len(tokens) != NUM_TOKENS:
            self.failures["wrong tokens"] += 1
        else:
            self.num_answered += 1

    def has_met(self, words: str) -> bool:
        return any(words in failure for failure in self.failures)

    async def _over_http(self, front: int, prompt: tuple[int, ...]) -> list[int] | None:
        """The tokens; None when it was refused."""
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            try:
                answer = await client.post(f"http://{HOST}:{front}/v1/completions", json=body)
            except httpx.ConnectError:
                return None
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    async def _over_grpc(self, client: Client, prompt: tuple[int, ...]) -> list[int] | None:
        """The tokens; None when it was refused."""
        stream = await client.run(Stream(prompt, NUM_TOKENS))
        if stream.code is grpc.StatusCode.UNAVAILABLE and not stream.tokens:
            return None
        if (stream.code, stream.detail) == UNHEARD and not stream.tokens:
            self.num_unheard += 1
            return None
        assert stream.code is grpc.StatusCode.OK, f"{stream.code}: {stream.detail}"
        return stream.tokens

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Asks as long as the block lasts, and to the end of what was begun."""
        is_on = True

        async def client() -> None:
            while is_on:
                await self.one()

        tasks = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            is_on = False
            await asyncio.gather(*tasks)


async def start(made: Site, engines: list[int], fronts: list[int]) -> None:
    for port in engines:
        made.start_engine(port)
    for port in fronts:
        made.start_frontend(port, *engines)
    for port in fronts:
        await up(made, port, *engines)


@asynccontextmanager
async def load_of(made: Site, fronts: list[int]) -> AsyncIterator[Load]:
    """A load of all frontends, for as long as the block lasts."""
    async with AsyncExitStack() as opened:
        texts = [await opened.enter_async_context(Client(made.grpc_ports[p])) for p in fronts]
        load = Load(fronts, texts)
        async with load.running():
            await asyncio.sleep(2)
            yield load
    print(f"{load.num_answered} answers; {load.num_moved} moved, {load.num_unheard} unheard")


async def test_a_rolling_restart_of_engines_fails_nobody(tmp_path: Path) -> None:
    engines, fronts = [free_port() for _ in range(3)], [free_port() for _ in range(2)]
    with site(tmp_path, engine_flags=FLAGS) as made:
        await start(made, engines, fronts)
        async with load_of(made, fronts) as load:
            for port in engines:
                await asyncio.to_thread(made.stop, port)
                made.start_engine(port)
                for front in fronts:
                    await up(made, front, port)
        assert not load.failures, load.failures
        assert load.num_answered > 100
        assert not load.num_moved, "control: no frontend had to refuse"
        assert not load.num_unheard, "no frontend stopped"


async def test_a_rolling_restart_of_frontends_fails_nobody(tmp_path: Path) -> None:
    """As they are by default: without a pause in which anybody could hear of it. A new one is known
    when it is ready, and an old one is forgotten some time after it has ended."""
    engine, fronts = free_port(), [free_port() for _ in range(2)]
    with site(tmp_path, engine_flags=FLAGS) as made:
        await start(made, [engine], fronts)
        async with load_of(made, fronts) as load:
            for _ in range(2):
                for port in fronts:
                    await asyncio.to_thread(made.stop, port)
                    await asyncio.sleep(1)
                    load.known.remove(port)
                    made.start_frontend(port, engine)
                    await up(made, port, engine)
                    load.known.append(port)
                    await asyncio.sleep(1)
        assert not load.failures, load.failures
        assert load.num_answered > 100
        assert load.num_moved, "control: some found a frontend away"
        assert load.num_unheard <= 2, "more than calls that met the moment of four stops"


async def test_control_killed_instead_of_asked_to_stop_some_fail(tmp_path: Path) -> None:
    """Those whose tokens had begun; who had none yet is moved, so that one kill may meet nobody."""
    engines, fronts = [free_port() for _ in range(2)], [free_port(), free_port()]
    with site(tmp_path, engine_flags=FLAGS) as made:
        await start(made, engines, fronts)
        async with load_of(made, fronts) as load:
            for _ in range(MOST_KILLS):
                made.kill(engines[0])
                await asyncio.sleep(3)
                if load.has_met("the engine was lost"):
                    break
                made.start_engine(engines[0])
                for port in fronts:
                    await up(made, port, engines[0])
                await asyncio.sleep(2)
            made.kill(fronts[0])
            await asyncio.sleep(3)
        assert load.has_met("the engine was lost"), load.failures
        assert load.has_met("RemoteProtocolError"), load.failures
