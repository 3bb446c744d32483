"""KV events over ZeroMQ, as routers read them that know vLLM's engine.

PUB: [topic, number (8 bytes, big-endian), msgpack of (ts, events, data_parallel_rank)], events as
tagged arrays: the structs below, in the order and under the names of vLLM's
vllm/distributed/kv_events.py (as of v0.11; fields behind `medium` are newer, and older readers skip
them). ROUTER: a reader sends a number and gets [number, payload] from there on, then -1.
It does not know the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine_service.core.journal import CacheCleared, KvEvent, PagesRemoved, PagesStored
from engine_service.server.kv_feed import KvBatch
from tidemill.runtime.errors import FailedPrecondition

REPLAY_BATCHES = 10_000
_REPLIES_AT_ONCE = 64
"""About 2 ms of the loop that all streams share: a ROUTER takes what is sent without ever waiting,
and a whole replay would be 0.3 s."""
_HIGH_WATER = 100_000
_NUMBER = struct.Struct(">q")
_END = _NUMBER.pack(-1)
_MEDIUM = "GPU"
_LOG = logging.getLogger("tidemill.engine.kv")


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """The cache salt of every block."""


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


def block_hash(digest: bytes) -> int:
    """The last 64 bits, unsigned: what all readers of the format take."""
    return int.from_bytes(digest[-8:], "big")


def to_wire(event: KvEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """A block of theirs is a unit of ours."""
    match event:
        case PagesStored(hashes, parent, token_ids, unit, salt):
            return BlockStored(
                block_hashes=[block_hash(one) for one in hashes],
                parent_block_hash=block_hash(parent) if parent else None,
                token_ids=list(struct.unpack(f"<{len(token_ids) // 4}I", token_ids)),
                block_size=unit,
                lora_id=None,
                medium=_MEDIUM,
                extra_keys=[(salt,)] * len(hashes) if salt else None,
            )
        case PagesRemoved(hashes):
            return BlockRemoved([block_hash(one) for one in hashes], _MEDIUM)
        case CacheCleared():
            return AllBlocksCleared()


class KvPublisher:
    """A PUB socket, and a ROUTER where `replay` names one. Never blocks: PUB drops what nobody
    takes."""

    def __init__(self, endpoint: str, replay: str | None, topic: str) -> None:
        """Binds where the address has a wildcard or is no TCP, and else connects: the habit of the
        format. Raises FailedPrecondition when it cannot."""
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._seq = 0
        self._context = zmq.Context()
        self._replies = zmq.asyncio.Context(self._context)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_HIGH_WATER)
        self._router: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            self._open(endpoint, replay)
        except zmq.ZMQError as failure:
            if self._router is not None:  # of the other context: this one would wait for it
                self._router.close(linger=0)
            self._context.destroy(linger=0)
            raise FailedPrecondition(
                f"cannot publish KV events at {endpoint!r} with replay {replay!r}: {failure}; "
                "choose another address with --kv-events-zmq or --kv-events-replay",
                reason="PORT_IN_USE",
                param="--kv-events-zmq",
            ) from failure

    def _open(self, endpoint: str, replay: str | None) -> None:
        is_place = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
        (self._pub.bind if is_place else self._pub.connect)(endpoint)
        if replay is not None:
            self._router = self._replies.socket(zmq.ROUTER)
            # A ROUTER drops what is above, the end's mark too: there is room for all that is kept.
            self._router.set_hwm(REPLAY_BATCHES + 1)
            self._router.bind(replay)
            self._task = asyncio.create_task(self._replay(self._router), name="kv-replay")

    def publish(self, batch: KvBatch) -> None:
        """Numbers count from 0, as readers expect who ask for what they missed."""
        events = [to_wire(event) for event in batch.events]
        payload = self._encoder.encode(EventBatch(batch.unix_s, events, 0))
        number = _NUMBER.pack(self._seq)
        self._seq += 1
        self._kept.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._router is not None:
            self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _NUMBER.size:
                _LOG.warning("not a request for KV events: %d frames", len(frames))
                continue
            reader, _, start = frames
            # What is kept now: batches that come meanwhile are told by PUB, behind these.
            wanted = [one for one in self._kept if one[0] >= start]
            for count, (number, payload) in enumerate(wanted, 1):
                with contextlib.suppress(zmq.Again):
                    await router.send_multipart((reader, b"", number, payload))
                if count % _REPLIES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await router.send_multipart((reader, b"", _END, b""))
