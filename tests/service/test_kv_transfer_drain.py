"""A prefill engine that drains ends when what it sends has arrived."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from engine_service.server import transfer_out
from tests.service.engine_fixtures import pack
from tests.service.test_kv_transfer import PAGE, address, engines
from tests.waiting import until
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

NUM_PAGES = 20


async def test_a_drain_waits_for_what_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_out, "PIECE_BYTES", 1)  # a page each, more than may be on the way
    async with (
        engines(tmp_path, {"role": "prefill"}) as (source,),
        grpc.aio.insecure_channel(address(source)) as channel,
    ):
        layout = pb.KvLayout(**source.desk.check_open().kv_layout._asdict())
        opened = pb.TransferOpen(
            prompt_token_ids=pack(*range(3, 3 + NUM_PAGES * PAGE)), layout=layout
        )
        call = rpc.KvTransferServiceStub(channel).Transfer()
        await call.write(pb.TransferRequest(open=opened))
        pieces = [await call.read()]
        await until(lambda: not source.desk.core.num_live)
        drained = asyncio.create_task(source.drain())
        assert not (await asyncio.wait({drained}, timeout=0.5))[0], "twelve pages are not sent"
        while len(pieces) < NUM_PAGES:
            await call.write(pb.TransferRequest(taken=pb.PieceTaken()))
            pieces.append(await call.read())
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await drained
        assert [one.piece.start for one in pieces] == list(range(0, NUM_PAGES * PAGE, PAGE))
        assert source.desk.num_cut_short == 0
