"""A replay of KV events beside everything else that the engine's loop does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq
import zmq.asyncio

from engine_service.core.journal import CacheCleared
from engine_service.server.kv_feed import KvBatch
from engine_service.server.kv_zmq import _REPLIES_AT_ONCE, KvPublisher
from tests.waiting import PATIENCE_S, free_port
from tidemill.runtime.errors import FailedPrecondition

BATCH = KvBatch(0, 0.0, [CacheCleared()])


def number_of(frame: bytes) -> int:
    return int.from_bytes(frame, "big", signed=True)


async def replay(asking: Any, start: int) -> list[int]:
    await asking.send_multipart((b"", start.to_bytes(8, "big")))
    numbers: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while not numbers or numbers[-1] != -1:
            numbers.append(number_of((await asking.recv_multipart())[1]))
    return numbers


async def test_a_replay_lets_others_run_and_batches_come_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that come during a replay are told by PUB, and none is missing between the two."""
    sent_in_turn, real = [0], zmq.asyncio.Socket.send_multipart

    def counted(self: Any, frames: Any, **options: Any) -> Any:
        sent_in_turn[-1] += 1
        return real(self, frames, **options)

    monkeypatch.setattr(zmq.asyncio.Socket, "send_multipart", counted)
    live, address = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    publisher, context = KvPublisher(live.replace("127.0.0.1", "*"), address, ""), zmq.Context()
    for _ in range(500):
        publisher.publish(BATCH)
    sub, asking = context.socket(zmq.SUB), zmq.asyncio.Context(context).socket(zmq.DEALER)
    sub.connect(live)
    sub.subscribe(b"")
    asking.connect(address)
    while not sub.poll(20):  # PUB drops what was sent before a reader has joined
        publisher.publish(BATCH)

    async def others() -> None:
        while True:
            if sent_in_turn[-1]:
                publisher.publish(BATCH)
            sent_in_turn.append(0)
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    *kept, end = await replay(asking, 0)
    beside.cancel()
    assert (kept, end) == (list(range(len(kept))), -1)
    assert max(sent_in_turn) <= _REPLIES_AT_ONCE + 1  # the end's mark, or what was asked
    publisher.publish(BATCH)
    newest, told = publisher._seq - 1, [number_of(sub.recv_multipart()[1])]
    while told[-1] != newest:
        told.append(number_of(sub.recv_multipart()[1]))
    assert told[0] < len(kept) <= newest
    assert told == list(range(told[0], newest + 1))
    assert await replay(asking, told[0]) == [*told, -1]
    sub.close(linger=0)
    asking.close(linger=0)
    await publisher.close()
    context.term()


async def test_a_replay_address_that_is_taken_is_told() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        replay_at = f"tcp://127.0.0.1:{port}"
        with pytest.raises(FailedPrecondition, match="choose another address") as told:
            KvPublisher(f"tcp://127.0.0.1:{free_port()}", replay_at, "")
        assert told.value.reason == "PORT_IN_USE"
        other.close(linger=0)
