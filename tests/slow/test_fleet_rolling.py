"""Everything is restarted, one after the other, while clients go on asking: nobody fails."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.real_stack import HOST
from tests.slow.fleets import Site, prompts, site, up
from tests.waiting import PATIENCE_S, free_port, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # a dozen processes start

NUM_CLIENTS, NUM_TOKENS = 24, 20
FLAGS = ("--max-rows=16", "--simulated-step-ms=50")


class Load:
    """Clients that ask one request after the other, each on a connection of its own, of frontends
    that say that they are ready.

    A connection that is refused, or a frontend that says that it is draining, makes a client ask
    the other one, once. Everything else that is no right answer is a failure.
    """

    def __init__(self, fronts: list[int]) -> None:
        self.fronts = fronts
        self.ready = set(fronts)
        self._numbers = itertools.count()
        self._whole: dict[tuple[int, ...], list[int]] = {}
        self.num_answered = 0
        self.num_moved = 0
        self.failures: Counter[str] = Counter()

    async def one(self) -> None:
        """Asks once, and judges the answer."""
        number = next(self._numbers)
        prompt = prompts(NUM_CLIENTS)[number % NUM_CLIENTS]
        ready = sorted(self.ready) or self.fronts
        fronts = [ready[(number + turn) % len(ready)] for turn in range(2)]
        try:
            tokens = await self._ask(fronts[0], prompt)
            if tokens is None:
                self.num_moved += 1
                tokens = await self._ask(fronts[1], prompt)
        except Exception as failure:
            self.failures[f"{type(failure).__name__}: {failure}"] += 1
            return
        if tokens is None:
            self.failures["refused by both"] += 1
        elif tokens != self._whole.setdefault(prompt, tokens) or len(tokens) != NUM_TOKENS:
            self.failures["wrong tokens"] += 1
        else:
            self.num_answered += 1

    async def _ask(self, front: int, prompt: tuple[int, ...]) -> list[int] | None:
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
        if answer.status_code == 503 and answer.json()["error"]["code"] == "draining":
            return None
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Asks as long as the block lasts, and to the end of what was begun."""
        is_on = True

        async def client() -> None:
            while is_on:
                await self.one()

        async def watch(front: int) -> None:
            async with httpx.AsyncClient(timeout=2) as probe:
                while is_on:
                    status = 0
                    with suppress(httpx.TransportError):
                        status = (
                            await probe.get(f"http://{HOST}:{front}/health/ready")
                        ).status_code
                    (self.ready.add if status == 200 else self.ready.discard)(front)
                    await asyncio.sleep(0.2)

        tasks = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
        tasks += [asyncio.create_task(watch(front)) for front in self.fronts]
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


async def test_a_rolling_restart_of_engines_fails_nobody(tmp_path: Path) -> None:
    engines, fronts = [free_port() for _ in range(3)], [free_port() for _ in range(2)]
    with site(tmp_path, engine_flags=FLAGS) as made:
        await start(made, engines, fronts)
        load = Load(fronts)
        async with load.running():
            await asyncio.sleep(2)
            for port in engines:
                await asyncio.to_thread(made.stop, port)
                made.start_engine(port)
                for front in fronts:
                    await up(made, front, port)
        print(f"{load.num_answered} answers; {load.num_moved} moved")
        assert not load.failures, load.failures
        assert load.num_answered > 100
        assert not load.num_moved, "control: no frontend had to refuse"


async def test_a_rolling_restart_of_frontends_fails_nobody(tmp_path: Path) -> None:
    """What balances the load heeds readiness, and has the pause of a drain to hear of it: without
    one, a connection that waits to be accepted is reset when a listener closes."""
    engine, fronts = free_port(), [free_port() for _ in range(2)]
    with site(tmp_path, engine_flags=FLAGS, frontend_flags=("--drain-pause-s=5",)) as made:
        await start(made, [engine], fronts)
        load = Load(fronts)
        async with load.running():
            await asyncio.sleep(2)
            for port in fronts:
                await asyncio.to_thread(made.stop, port)
                made.start_frontend(port, engine)
                await up(made, port, engine)
                await until(lambda: port in load.ready)  # noqa: B023 (awaited here)
            await asyncio.sleep(2)
        print(f"{load.num_answered} answers; {load.num_moved} moved")
        assert not load.failures, load.failures
        assert load.num_answered > 100


async def test_control_killed_instead_of_asked_to_stop_some_fail(tmp_path: Path) -> None:
    engines, fronts = [free_port() for _ in range(2)], [free_port()]
    with site(tmp_path, engine_flags=FLAGS) as made:
        await start(made, engines, fronts)
        load = Load(fronts)
        async with load.running():
            await asyncio.sleep(3)
            made.kill(engines[0])
            await asyncio.sleep(5)
        assert any("the engine was lost" in one for one in load.failures), load.failures
