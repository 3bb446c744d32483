"""Runs the images' health check against a real health service of ours."""

import asyncio
import os
import sys
from pathlib import Path

import grpc

from tests.waiting import free_port, until
from tidemill.runtime.health import Health

SCRIPT = Path(__file__).parents[2] / "docker" / "healthcheck.py"


async def run(*words: str, **environ: str) -> int:
    """The exit status of the script."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TIDEMILL_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *words, env=kept | environ
    )
    return await process.wait()


async def status_of(serving: bool | None) -> int:
    """What it says of a service that is ready, loading, or (None) not there."""
    if serving is None:
        return await run(f"TIDEMILL_GRPC_PORT={free_port()}")
    server, health = grpc.aio.server(), Health(("", "readiness"))
    await health.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    health.tell("readiness", serving)
    await until(lambda: not health._telling)
    try:
        # The variable that is set wins; the default behind it is nobody's port.
        words = ("TIDEMILL_HEALTH_PORT", f"TIDEMILL_GRPC_PORT={free_port()}")
        return await run(*words, TIDEMILL_HEALTH_PORT=str(port))
    finally:
        await server.stop(None)
