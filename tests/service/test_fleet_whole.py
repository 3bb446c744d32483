"""A frontend that has some of its engines: what it says of itself, and who waits for the rest."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.service.fake_engine import serving
from tests.service.frontends import make_engine
from tests.waiting import PATIENCE_S, free_port, http_client, until
from tidemill.commands import engine_state

EVERY_S = 0.05


async def test_a_start_waits_for_every_engine_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (make_engine(tmp_path, instance_id=name)[0] for name in "ab")
    async with AsyncExitStack() as opened:
        ports = await opened.enter_async_context(serving(first)), free_port()
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        frontend = await FrontendServer.start(
            FrontendConfig(engine=addresses, http_port=0, grpc_port=0)
        )
        opened.push_async_callback(frontend.stop)
        await until(lambda: frontend.desk.state == "ready")
        ask = "127.0.0.1", frontend.http_port, EVERY_S
        async with http_client(f"http://127.0.0.1:{frontend.http_port}") as client:
            told = await client.get("/health")
            assert (told.status_code, told.json()["status"]) == (200, "degraded")
            assert told.json()["reasons"] == ["1 of 2 engines take no requests"]
            assert (await client.get("/health/ready")).status_code == 200

            with monkeypatch.context() as short:
                short.setattr(engine_state, "_OTHERS_S", 0.2)
                await asyncio.wait_for(engine_state.healthy(*ask), PATIENCE_S)

            monkeypatch.setattr(engine_state, "_OTHERS_S", 3 * PATIENCE_S)
            waits = asyncio.create_task(engine_state.healthy(*ask))
            await asyncio.sleep(1.0)
            assert not waits.done()
            await opened.enter_async_context(serving(second, ports[1]))
            await asyncio.wait_for(waits, PATIENCE_S)
            assert (await client.get("/health")).json()["status"] == "healthy"
