"""What a prefill engine sends, by what its caller says that it has read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from engine_service.core.handoff import (
    MAX_ON_THE_WAY,
    BeginTransfer,
    Begun,
    EndTransfer,
    Exported,
    ExportPages,
    KvLayout,
)
from engine_service.pieces import Files, Views
from engine_service.server.transfer_counts import TransferCounts
from engine_service.server.transfer_out import HEADER_BYTES, PIECE_BYTES, Sending
from tests.waiting import PATIENCE_S
from tidemill.runtime.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from tidemill.telemetry.families import Families
from tidemill.telemetry.tracer import Span, Tracer
from tidemill.v1 import engine_pb2 as pb

PAGE, NUM_PIECES = 16, 40
MOST_BYTES = 64 << 20
FILES = Files()
EMPTY = FILES.offer(1, 0, bytes)
LAYOUT = KvLayout("m", "w", "float32", PAGE, 1, 1, 8)


class Asks:
    """A core that has the KV, and answers while `answers` is set."""

    def __init__(self) -> None:
        self.unit_bytes, self.num_found = PIECE_BYTES, NUM_PIECES * PAGE
        self.num_open = self.most_open = 0
        self.has_ended = False
        self.answers = asyncio.Event()

    async def ask(self, control: Any, **_: Any) -> Any:
        if isinstance(control, BeginTransfer):
            return Begun(1, NUM_PIECES * PAGE, self.num_found, self.unit_bytes, PAGE)
        assert isinstance(control, ExportPages)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await self.answers.wait()
        self.num_open -= 1
        return Exported(PAGE, EMPTY)

    def post(self, control: Any) -> None:
        assert isinstance(control, EndTransfer)
        self.has_ended = True


class Talk:
    """A caller, as the handler's context."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        self.starts: list[int] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.frames.put_nowait(pb.TransferRequest(open=pb.TransferOpen(layout=LAYOUT._asdict())))

    def say_taken(self, count: int) -> None:
        for _ in range(count):
            self.frames.put_nowait(pb.TransferRequest(taken=pb.PieceTaken()))

    async def read(self) -> Any:
        frame = await self.frames.get()
        if isinstance(frame, Exception):
            raise frame
        return frame

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, answer: pb.TransferResponse) -> None:
        await self.reads.wait()
        self.starts.append(answer.piece.start)
        await asyncio.sleep(0)


def sending(asks: Asks, talk: Talk, patience_s: float = PATIENCE_S) -> asyncio.Task[None]:
    desk: Any = SimpleNamespace(
        check_open=lambda: SimpleNamespace(kv_layout=LAYOUT, role="prefill", model_id="m"),
        core=SimpleNamespace(asks=asks),
        board=SimpleNamespace(snapshot=SimpleNamespace(paused=True)),
        config=SimpleNamespace(
            kv_connector="grpc",
            max_message_bytes=MOST_BYTES,
            kv_transfer_timeout_s=patience_s,
        ),
        observer=SimpleNamespace(
            metrics=SimpleNamespace(transfers=TransferCounts(Families())),
            sends=lambda _: Span(Tracer("test", None), None),
        ),
    )
    return asyncio.create_task(Sending(desk, talk, asyncio.Semaphore(1), Views()).run())


async def settled() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_no_more_is_on_the_way_than_is_taken() -> None:
    asks, talk = Asks(), Talk()
    asks.answers.set()
    run = sending(asks, talk)
    for taken in (0, 3, 1):
        talk.say_taken(taken)
        before = len(talk.starts)
        await settled()
        assert len(talk.starts) - before == (taken or MAX_ON_THE_WAY)
    talk.say_taken(NUM_PIECES)
    await asyncio.wait_for(run, 5)
    assert talk.starts == list(range(0, NUM_PIECES * PAGE, PAGE))


async def test_what_is_taken_before_it_is_sent_costs_the_core_no_more() -> None:
    asks, talk = Asks(), Talk()
    talk.say_taken(3 * NUM_PIECES)
    run = sending(asks, talk)
    await settled()
    assert asks.most_open == MAX_ON_THE_WAY
    asks.answers.set()
    await asyncio.wait_for(run, 5)
    assert asks.most_open == MAX_ON_THE_WAY
    assert talk.starts == list(range(0, NUM_PIECES * PAGE, PAGE))


@pytest.mark.parametrize("taken", [0, 5])
async def test_a_caller_that_says_no_more_gets_everything(taken: int) -> None:
    asks, talk = Asks(), Talk()
    talk.say_taken(taken)
    talk.frames.put_nowait(grpc.aio.EOF)
    asks.answers.set()
    await asyncio.wait_for(sending(asks, talk), 5)
    assert talk.starts == list(range(0, NUM_PIECES * PAGE, PAGE))


async def test_a_caller_that_never_says_what_it_wants_is_ended() -> None:
    talk = Talk()
    talk.frames.get_nowait()
    with pytest.raises(DeadlineExceeded, match=r"silent for 0.1 s, and its TransferOpen") as caught:
        await asyncio.wait_for(sending(Asks(), talk, 0.1), PATIENCE_S)
    assert caught.value.reason == "KV_SILENT"


async def test_a_caller_that_never_says_what_it_took_is_ended_and_holds_nothing() -> None:
    """Its time begins anew with each word."""
    asks, talk = Asks(), Talk()
    asks.answers.set()
    run = sending(asks, talk, 4.0)
    for _ in range(3):
        await asyncio.sleep(1.5)
        talk.say_taken(1)
    await settled()
    assert not run.done(), "it was not silent for so long"
    with pytest.raises(DeadlineExceeded, match=r"silent for 4 s, and a PieceTaken") as caught:
        await asyncio.wait_for(run, PATIENCE_S)
    assert (caught.value.reason, asks.has_ended) == ("KV_SILENT", True)


async def test_a_caller_that_reads_no_more_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """It holds nothing, and nobody waits for it to read a status."""
    asks, talk = Asks(), Talk()
    asks.answers.set()
    talk.reads.clear()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(sending(asks, talk, 0.5), PATIENCE_S)
    assert asks.has_ended
    assert "silent for 0.5 s, and that it reads a KvPiece" in caplog.text


async def test_a_frame_that_is_none_ends_the_transfer() -> None:
    """While its caller is waited for, who would wait for an answer as long as the engine does."""
    asks, talk = Asks(), Talk()
    asks.answers.set()
    run = sending(asks, talk)
    talk.say_taken(1)
    await settled()
    talk.frames.put_nowait(DecodeError("no message"))
    with pytest.raises(DecodeError, match="no message"):
        await asyncio.wait_for(run, 5)
    assert asks.has_ended


async def test_a_paused_engine_computes_no_prompt_and_says_so_at_once() -> None:
    """What it has it sends, as in the other tests: all of these engines are paused."""
    asks, talk = Asks(), Talk()
    asks.num_found -= PAGE
    with pytest.raises(Unavailable, match="paused and computes no prompts") as caught:
        await asyncio.wait_for(sending(asks, talk), PATIENCE_S)
    assert (caught.value.reason, asks.has_ended, talk.starts) == ("PAUSED", True, [])


async def test_a_unit_that_no_message_holds_is_refused_before_it_is_computed() -> None:
    asks, talk = Asks(), Talk()
    asks.answers.set()
    asks.unit_bytes = MOST_BYTES - HEADER_BYTES + 1
    with pytest.raises(FailedPrecondition, match="smaller --page-size") as caught:
        await sending(asks, talk)
    assert (caught.value.reason, talk.starts) == ("KV_UNIT_TOO_LARGE", [])
    piece = pb.KvPiece(
        start=2**32 - 1, num_tokens=2**32 - 1, crc32=1, inline=bytes(MOST_BYTES - HEADER_BYTES)
    )
    assert pb.TransferResponse(piece=piece).ByteSize() <= MOST_BYTES
