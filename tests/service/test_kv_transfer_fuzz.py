"""Whatever a decode engine says: a prefill engine answers with a status, and then holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.server.launch import EngineServer
from tests.e2e.messages_drawn import draw_message, vary
from tests.e2e.test_fuzz_grpc import BUGS
from tests.service.engine_fixtures import pack, rest
from tests.service.test_kv_transfer import address, engines, is_free, moved
from tests.waiting import until
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

NUM_TALKS = 150
ANSWER_S = 20.0
SMALL_PIECES = 40_000
"""So that a prompt is several of half as many bytes."""


def talk(stub: Any, frames: list[pb.TransferRequest]) -> tuple[grpc.StatusCode, int]:
    """How a call with these frames ends, and how many tokens it brought."""
    call, num_tokens = stub.Transfer(iter(frames), timeout=ANSWER_S), 0
    try:
        for answer in call:
            num_tokens += answer.piece.num_tokens
    except grpc.RpcError as failure:
        return failure.code(), num_tokens
    return call.code(), num_tokens


def draw_frames(draw: Any, opened: pb.TransferRequest) -> list[pb.TransferRequest]:
    first = pb.TransferRequest()
    first.CopyFrom(opened)
    if draw(st.booleans()):
        vary(draw, first.open)
    frames = [first] if draw(st.integers(0, 5)) else []
    for _ in range(draw(st.integers(0, 4))):
        is_any = draw(st.booleans())
        taken = pb.TransferRequest(taken=pb.PieceTaken())
        frames.append(draw_message(draw, pb.TransferRequest.DESCRIPTOR) if is_any else taken)
    return frames


async def check_broken(source: EngineServer, opened: pb.TransferRequest) -> None:
    """Bytes that are no frame, while pieces are on their way: told at once."""
    async with grpc.aio.insecure_channel(address(source)) as channel:
        call = channel.stream_stream("/tidemill.v1.KvTransferService/Transfer")(timeout=ANSWER_S)
        await call.write(opened.SerializeToString())
        assert await call.read()
        await call.write(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert to_error(caught.value).reason == "MALFORMED_MESSAGE"


@contextmanager
def changed(source: EngineServer, **flags: Any) -> Iterator[None]:
    desk, before = source.desk, source.desk.config
    desk.config = replace(before, **flags)
    yield
    desk.config = before


async def check_unread(source: EngineServer, opened: pb.TransferRequest, num_read: int) -> None:
    """A caller that reads no more, and whose transport has no room: while it lives its call does,
    and nothing of the engine is held for it, nor waited for when the engine ends."""
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(address(source), options=options) as channel:
        call = rpc.KvTransferServiceStub(channel).Transfer(timeout=ANSWER_S)
        await call.write(opened)
        for _ in range(num_read):
            assert await call.read()
            await call.write(pb.TransferRequest(taken=pb.PieceTaken()))
        await until(lambda: bool(source.desk.sending))
        await until(lambda: is_free(source) and not source.desk.sending, ANSWER_S / 2)
        assert not call.done(), "it ended by itself"


async def check_silent(source: EngineServer, opened: pb.TransferRequest) -> None:
    async with grpc.aio.insecure_channel(address(source)) as channel:
        for frames, due in (([], "its TransferOpen"), ([opened], "a PieceTaken")):
            call = rpc.KvTransferServiceStub(channel).Transfer(timeout=ANSWER_S)
            for one in frames:
                await call.write(one)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest(call)
            error = to_error(caught.value)
            assert (error.reason, due in error.message) == ("KV_SILENT", True), error.message
            await until(lambda: is_free(source))


async def test_no_frame_of_a_transfer_is_too_strange(tmp_path: Path) -> None:
    async with engines(tmp_path, {"role": "prefill"}) as (source,):
        layout = pb.KvLayout(**source.desk.check_open().kv_layout._asdict())
        opened = pb.TransferRequest(
            open=pb.TransferOpen(prompt_token_ids=pack(*range(3, 67)), layout=layout)
        )
        seen = set()

        def ask_all() -> None:
            with grpc.insecure_channel(address(source)) as channel:
                stub = rpc.KvTransferServiceStub(channel)

                @settings(max_examples=NUM_TALKS)
                @given(st.data())
                def ask(data: st.DataObject) -> None:
                    frames = draw_frames(data.draw, opened)
                    status, _ = talk(stub, frames)
                    assert status not in BUGS - {grpc.StatusCode.UNAVAILABLE}, (status, frames)
                    assert status is not grpc.StatusCode.DEADLINE_EXCEEDED, frames
                    seen.add(status)

                ask()
                assert talk(stub, [opened]) == (grpc.StatusCode.OK, 64), "the plain one is served"

        await asyncio.to_thread(ask_all)
        await check_broken(source, opened)
        long = pb.TransferRequest()
        long.CopyFrom(opened)
        long.open.prompt_token_ids = pack(*(3 + one % 64 for one in range(1200)))
        with changed(source, kv_transfer_timeout_s=3.0, max_message_bytes=SMALL_PIECES):
            await check_silent(source, opened)
            for num_read in (0, 1):
                await check_unread(source, long, num_read)
        await until(lambda: is_free(source))
        assert {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION} <= seen, seen
        assert not any(moved(source, "kv_transfers_open").values())
