"""A prefill engine that drains ends when what it sends has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_service.server import transfer_out
from engine_service.server.launch import EngineServer
from tests.service.engine_fixtures import admin, pack
from tests.service.test_kv_transfer import PAGE, address, engines
from tests.waiting import until
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

NUM_PAGES = 20


@asynccontextmanager
async def sending(
    folder: Path, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[EngineServer, Any, Any, Any]]:
    """An engine whose prompt is computed, more of whose pages are to be sent than may be on the
    way; its operator's stub, the call, and the first page."""
    patch.setattr(transfer_out, "PIECE_BYTES", 1)  # a page each
    async with (
        engines(folder, {"role": "prefill", "admin_port": 0}) as (source,),
        admin(source) as operator,
        grpc.aio.insecure_channel(address(source)) as channel,
    ):
        layout = pb.KvLayout(**source.desk.check_open().kv_layout._asdict())
        opened = pb.TransferOpen(
            prompt_token_ids=pack(*range(3, 3 + NUM_PAGES * PAGE)), layout=layout
        )
        call = rpc.KvTransferServiceStub(channel).Transfer()
        await call.write(pb.TransferRequest(open=opened))
        first = await call.read()
        await until(lambda: not source.desk.core.num_live)
        yield source, operator, call, first
        call.cancel()


async def test_a_drain_waits_for_what_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sending(tmp_path, monkeypatch) as (source, operator, call, first):
        pieces = [first]
        asked = asyncio.ensure_future(operator.Drain(pb.DrainRequest()))
        await until(source.desk.stop.is_set)
        drained = asyncio.create_task(source.drain())
        done, _ = await asyncio.wait({drained, asked}, timeout=0.5)
        assert not done, "twelve pages are not sent"
        while len(pieces) < NUM_PAGES:
            await call.write(pb.TransferRequest(taken=pb.PieceTaken()))
            pieces.append(await call.read())
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await drained
        await asked
        assert [one.piece.start for one in pieces] == list(range(0, NUM_PAGES * PAGE, PAGE))
        assert source.desk.num_cut_short == 0


async def test_pages_that_outlast_a_drain_are_not_said_to_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sending(tmp_path, monkeypatch) as (source, operator, _, _):
        asked = asyncio.ensure_future(operator.Drain(pb.DrainRequest(timeout_ms=100)))
        await until(source.desk.stop.is_set)
        await source.drain()
        with pytest.raises(grpc.aio.AioRpcError, match=r"1 requests still ran after 0\.1 s"):
            await asked
