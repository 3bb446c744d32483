"""Twice the load that an engine can take, for a minute, through HTTP.

It stays busy; whoever it takes in is served soon, and whoever it does not take hears so at once.
Arrivals are open loop: nobody waits for answers before asking. Steps have a fixed length, so that
the capacity is known and does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from tests.e2e.test_serve import Served, serve
from tests.waiting import free_port

ROWS, TOKENS, STEP_MS = 16, 32, 20.0
CAPACITY = ROWS / ((TOKENS + 1) * STEP_MS / 1000)
"""Requests per second: a prompt takes a step, and then each token one."""
CALM_S, OVERLOAD_S, WARM_UP_S = 30.0, 60.0, 5.0
REFUSED_S = 0.05
GROWTH = 1.1
FLAGS = (
    "--executor=simulated",
    f"--simulated-step-ms={STEP_MS}",
    f"--max-rows={ROWS}",
    "--max-queue-delay-s=0.25",
)


class Outcome(NamedTuple):
    """Of one request; seconds since it was due."""

    first_s: float | None
    """None: it was refused."""
    end_s: float
    num_chunks: int
    retry_after: str


Ask = Callable[[], Awaitable[Outcome]]


async def open_loop(ask: Ask, rate: float, seconds: float, rng: random.Random) -> list[Outcome]:
    """Asks at random moments, `rate` a second on average, and waits for all answers."""
    begin, due, tasks = time.monotonic(), 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(begin + due - time.monotonic())
        tasks.append(asyncio.create_task(ask()))
    return list(await asyncio.gather(*tasks))


def http_asker(http: httpx.AsyncClient, rng: random.Random) -> Ask:
    """Streams of 32 tokens; every answer is whole, or a 429 that says when to come back."""
    body = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}

    async def ask() -> Outcome:
        began, first, chunks = time.monotonic(), None, 0
        asked = {**body, "prompt": f"{rng.randrange(10**6)}"}
        async with http.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                error = (await answer.aread()).decode()
                assert answer.status_code == 429, error
                assert "overloaded_error" in error
                retry_after = answer.headers["retry-after"]
                return Outcome(None, time.monotonic() - began, 0, retry_after)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first, chunks = first or time.monotonic(), chunks + 1
            assert line in ("data: [DONE]", ""), line
        assert first is not None
        return Outcome(first - began, time.monotonic() - began, chunks, "")

    return ask


@asynccontextmanager
async def client(port: int) -> Any:
    limits = httpx.Limits(max_connections=400, max_keepalive_connections=400)
    address = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60.0) as http:
        yield http


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def memory(served: Served) -> dict[str, int]:
    return {name: psutil.Process(pid).memory_info().rss for name, pid in served.children().items()}


@pytest.mark.slow
async def test_twice_the_load_for_a_minute(tmp_path: Path, seed: int) -> None:
    port, rng = free_port(), random.Random(seed)
    ports = (f"--http-port={port}", "--grpc-port=0", "--engine-port=0")
    with serve(tmp_path, "demo", *ports, *FLAGS) as served:
        served.wait_ready()
        async with client(port) as http:
            ask = http_asker(http, rng)
            await open_loop(ask, 2 * CAPACITY, WARM_UP_S, rng)  # connections, and the first measure
            calm = await open_loop(ask, 0.8 * CAPACITY, CALM_S, rng)
            await open_loop(ask, 2 * CAPACITY, WARM_UP_S, rng)
            before, began = memory(served), time.monotonic()
            busy = await open_loop(ask, 2 * CAPACITY, OVERLOAD_S, rng)
            seconds, after = time.monotonic() - began, memory(served)
    firsts = [one.first_s for one in busy if one.first_s is not None]
    refused = [one.end_s for one in busy if one.first_s is None]
    calm_p99 = percentile([one.first_s for one in calm if one.first_s is not None], 0.99)
    goodput = len(firsts) / (seconds * CAPACITY)
    print(
        f"goodput {goodput:.1%} of {CAPACITY:.1f} requests/s; p99 TTFT {calm_p99 * 1e3:.0f} ms at "
        f"80 %, {percentile(firsts, 0.99) * 1e3:.0f} ms at 200 %; {len(refused)} refused in "
        f"{percentile(refused, 0.5) * 1e3:.0f} ms (median), {percentile(refused, 0.99) * 1e3:.0f} "
        f"ms (p99); memory {before} to {after}"
    )
    assert goodput >= 0.9
    assert percentile(firsts, 0.99) <= 3 * calm_p99
    assert percentile(refused, 0.99) <= REFUSED_S
    assert all(after[name] <= before[name] * GROWTH for name in before)
    assert all(int(one.retry_after) >= 1 for one in busy if one.first_s is None)
