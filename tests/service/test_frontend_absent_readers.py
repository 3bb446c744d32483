"""Clients that hardly read leave nothing behind in the frontend; others are served meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.absent_readers import AbsentReaders
from tests.service.frontends import stack
from tests.waiting import until

CLIENTS, TOKENS = 100, 400


async def test_clients_that_do_not_read_leave_nothing_behind(tmp_path: Path) -> None:
    limits = {"max_model_len": 1000, "tokens_per_step": 40, "hold_after": 360}
    async with stack(tmp_path, engine=limits) as served, served.http() as client:
        desk, engine = served.frontend.desk, served.engine
        body = {"prompt": "ab", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        before = len(asyncio.all_tasks())
        ports = served.frontend.http_port, served.frontend.grpc_port
        absent = AbsentReaders("127.0.0.1", *ports, TOKENS)
        await absent.open(CLIENTS)
        await until(lambda: engine.live == desk.num_live == CLIENTS)
        await until(lambda: engine.sent >= 360 * CLIENTS)
        assert len(asyncio.all_tasks()) > before + CLIENTS
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        await absent.read_a_little(CLIENTS // 2)
        assert desk.num_live == CLIENTS
        await absent.vanish()
        await until(lambda: engine.live == desk.num_live == desk.fleet.num_slots == 0)
        await until(lambda: len(asyncio.all_tasks()) <= before)
        assert engine.outcomes.count("aborted") == CLIENTS
        assert (await client.post("/v1/completions", json=body)).status_code == 200
