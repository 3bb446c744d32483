"""2,000 clients that hardly read, or vanish, leave memory, files and pages where they were.

When they vanish, those with a row are in the middle of their stream and most wait for one.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.real_stack import HOST, ROOT, Faces, Stack, connected, good, until_idle
from tests.e2e.test_serve import serve
from tests.slow.test_soak import Held, grown, held
from tests.waiting import eventually, free_port

CLIENTS, TOKENS = 2000, 400
READING = 60
"""Of either protocol."""
ROWS = 256
PAGES = 12 * ROWS
"""Of rows that are half way."""
FILES = 8192
FLAGS = (
    "--executor=simulated",
    "--simulated-step-ms=50",
    f"--max-rows={ROWS}",
    "--num-pages=8192",
    "--max-model-len=512",
    f"--max-queued-requests={CLIENTS}",
    "--max-queue-delay-s=0",  # nobody is refused for the time that others stayed
    "--drain-timeout-s=1",
)


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """For this process and those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def absent_readers(stack: Stack) -> AsyncIterator[Callable[[str], Any]]:
    """Has them do what a word says. They are killed at the end: then no connection is left."""
    numbers = (stack.http_port, stack.grpc_port, TOKENS)
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.absent_readers", HOST, *map(str, numbers),
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None

    async def do(words: str) -> None:
        program.stdin.write(f"{words}\n".encode())
        assert (await program.stdout.readline()).decode().strip() == words.split()[0]

    try:
        yield do
    finally:
        program.kill()
        await program.wait()


async def come_and_go(
    stack: Stack, faces: Faces, count: int, metrics: dict[str, str]
) -> dict[str, Held]:
    """`count` clients from their first request to their end; what is held while they are there."""
    async with absent_readers(stack) as do:
        # Those that read come first: behind others they would have to wait for their rows.
        await do(f"open {2 * READING}")
        await faces.until_busy(lambda running, *_: running == 2 * READING)
        await do(f"open {count - 2 * READING}")
        await faces.until_busy(lambda running, waiting, pages, requests: requests >= 0.9 * count)
        await do(f"read {READING}")
        await faces.until_busy(lambda running, waiting, pages, requests: pages >= PAGES)
        running, _, _, requests = await faces.busy()
        assert running == ROWS, "somebody could have had a row"
        assert requests >= 0.9 * count, "somebody has left"
        holding = held(stack, metrics)
        await do("vanish")
    await until_idle(faces)
    return holding


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
async def test_absent_readers_leave_nothing_behind(tmp_path: Path) -> None:
    stack = Stack(free_port(), free_port(), free_port())
    metrics_port = free_port()
    metrics = {"engine_service": f"http://{HOST}:{metrics_port}", "frontend": stack.url}
    ports = (
        f"--http-port={stack.http_port}",
        f"--grpc-port={stack.grpc_port}",
        f"--engine-port={stack.port}",
        f"--metrics-port={metrics_port}",
    )
    with serve(tmp_path, "demo", *ports, *FLAGS) as served:
        served.wait_ready()
        stack.services |= served.children()
        async with connected(stack) as faces:
            await good(faces)
            for _ in range(2):  # what is kept for reuse is there by then
                await come_and_go(stack, faces, CLIENTS, metrics)
            before = held(stack, metrics)
            holding = await come_and_go(stack, faces, CLIENTS, metrics)
            print(before, holding, held(stack, metrics), sep="\n")
            assert "frontend" in grown(before, holding), "control: they are not seen at all"
            await asyncio.to_thread(
                eventually, lambda: not grown(before, held(stack, metrics)), "a process grew"
            )
            await good(faces)
