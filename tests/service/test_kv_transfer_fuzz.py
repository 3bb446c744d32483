"""Whatever a decode engine says: a prefill engine answers with a status, and then holds nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.messages_drawn import draw_message, vary
from tests.e2e.test_fuzz_grpc import BUGS
from tests.service.engine_fixtures import pack
from tests.service.test_kv_transfer import address, engines, is_free, moved
from tests.waiting import until
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
        await until(lambda: is_free(source))
        assert {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION} <= seen, seen
        assert not any(moved(source, "kv_transfers_open").values())
