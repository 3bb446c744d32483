"""More connections than a shell's limit of open files lets a process have."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, free_port

ROOT = Path(__file__).parents[2]
SOFT, COUNT = 160, 300
START = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT}, int(sys.argv[1])))
from frontend.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


async def ask(port: int, patience_s: float = 5.0) -> asyncio.StreamWriter | None:
    """A connection that stays open; None when it brought no answer in time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n")
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(patience_s):
            if (await reader.readline()).startswith(b"HTTP/1.1 200"):
                return writer
    writer.close()
    return None


async def until_up(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(OSError):
                writer = await ask(port)
                if writer is not None:
                    writer.close()
                    return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("hard", [4096, SOFT])
async def test_the_soft_limit_is_raised_to_the_hard_one(hard: int) -> None:
    """The control: where the hard limit is as low, connections wait in vain."""
    port, grpc_port = free_port(), free_port()
    ports = ["--http-port", str(port), "--grpc-port", str(grpc_port)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, str(hard), *ports, cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        await until_up(port)
        patience_s = PATIENCE_S if hard > SOFT else 5.0  # the control waits until it is over
        answered = await asyncio.gather(*(ask(port, patience_s) for _ in range(COUNT)))
        assert (None not in answered) == (hard > SOFT)
        for writer in answered:
            if writer is not None:
                writer.close()
    finally:
        process.kill()
        await process.wait()
