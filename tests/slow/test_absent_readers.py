"""2,000 clients that hardly read, or vanish, leave memory, files and pages where they were.

When they vanish, some are in the middle of their stream and most wait for a row.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.absent_readers import AbsentReaders
from tests.e2e.real_stack import HOST, Faces, Stack, connected, good, until_idle
from tests.e2e.test_serve import serve
from tests.slow.test_soak import grown, held
from tests.waiting import eventually, free_port

CLIENTS, TOKENS = 2000, 400
READING = 60
FILES = 8192
FLAGS = (
    "--executor=simulated",
    "--simulated-step-ms=200",
    "--max-rows=256",
    "--num-pages=8192",
    "--max-model-len=512",
    f"--max-queued-requests={CLIENTS}",
    "--drain-timeout-s=1",
)


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """For this process and those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def come_and_go(stack: Stack, faces: Faces, count: int) -> int:
    """`count` clients from their first request to their end; the most pages in use."""
    absent = AbsentReaders(HOST, stack.http_port, stack.grpc_port, count, TOKENS)
    await absent.open()
    await faces.until_busy(lambda running, waiting, pages, requests: requests >= 0.9 * count)
    await absent.read_a_little(READING)
    most = (await faces.busy())[2]
    assert most, "nobody has pages"
    await absent.vanish()
    await until_idle(faces)
    return most


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_2000_absent_readers_leave_nothing_behind(tmp_path: Path) -> None:
    stack = Stack(free_port(), free_port(), free_port())
    ports = (f"--http-port={stack.http_port}", f"--grpc-port={stack.grpc_port}")
    with serve(tmp_path, "demo", f"--engine-port={stack.port}", *ports, *FLAGS) as served:
        served.wait_ready()
        stack.services |= served.children()
        async with connected(stack) as faces:
            await good(faces)
            await come_and_go(stack, faces, CLIENTS)  # what is kept for reuse is there by now
            before = held(stack)
            pages = await come_and_go(stack, faces, CLIENTS)
            print(f"up to {pages} pages", before, held(stack))
            await asyncio.to_thread(
                eventually, lambda: not grown(before, held(stack)), "a process grew"
            )
            await good(faces)
