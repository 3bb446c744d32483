"""Whatever a decode engine says: a prefill engine answers with a status, and then holds nothing."""

from __future__ import annotations

import asyncio
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


async def check_silent(source: EngineServer, opened: pb.TransferRequest) -> None:
    before, desk = source.desk.config, source.desk
    desk.config = replace(before, kv_transfer_timeout_s=1.0)
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
    desk.config = before


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
        await check_silent(source, opened)
        await until(lambda: is_free(source))
        assert {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION} <= seen, seen
        assert not any(moved(source, "kv_transfers_open").values())
