"""What the prefix index holds, as the KV events of the gateways' contract.

A block of theirs is a unit of ours.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from engine_service.core.journal import CacheCleared, KvEvent, PagesRemoved, PagesStored

CHUNK_EVENTS = 256
"""Events of one message of a snapshot."""


class KvWire:
    """Makes batches; sequence numbers are those of the feed."""

    def __init__(self) -> None:
        """The wheel is there: the service is served."""
        from smg_grpc_proto.generated import common_pb2

        self._common: Any = common_pb2

    def batch(self, seq: int, unix_s: float, events: Sequence[KvEvent]) -> Any:
        """What one step changed."""
        made = map(self._event, range(len(events)), events)
        return self._common.KvEventBatch(sequence_number=seq, timestamp=unix_s, events=made)

    def snapshot(self, seq: int, unix_s: float, events: Sequence[KvEvent]) -> Iterator[Any]:
        """All that is held behind batch `seq`, in chunks whose numbers end there. The first one
        begins with a clearing, so that what a subscriber knew before does not count."""
        size = CHUNK_EVENTS
        cuts = [events[at : at + size] for at in range(0, len(events), size)] or [[]]
        num_blocks = sum(len(one.hashes) for one in events if isinstance(one, PagesStored))
        for index, cut in enumerate(cuts):
            whole = cut if index else [CacheCleared(), *cut]
            chunk = self.batch(seq - len(cuts) + 1 + index, unix_s, whole)
            for event in chunk.events:
                event.event_id = 0
            chunk.snapshot.index, chunk.snapshot.count = index, len(cuts)
            chunk.snapshot.blocks = num_blocks
            yield chunk

    def _event(self, event_id: int, event: KvEvent) -> Any:
        common = self._common
        match event:
            case PagesStored():
                made = common.KvCacheEvent(stored=self._stored(event))
            case PagesRemoved(hashes):
                removed = common.KvBlocksRemoved(
                    block_hashes=map(_number, hashes), tier=common.KV_CACHE_TIER_DEVICE
                )
                made = common.KvCacheEvent(removed=removed)
            case CacheCleared():
                made = common.KvCacheEvent(cleared=common.KvCacheCleared())
        made.event_id = event_id
        return made

    def _stored(self, event: PagesStored) -> Any:
        token_ids = struct.unpack(f"<{len(event.token_ids) // 4}I", event.token_ids)
        cuts = pairwise(range(0, len(token_ids) + 1, event.unit))
        blocks = [
            self._common.KvBlock(
                block_hash=_number(digest),
                token_ids=token_ids[start:stop],
                block_size=event.unit,
            )
            for digest, (start, stop) in zip(event.hashes, cuts, strict=True)
        ]
        return self._common.KvBlocksStored(
            blocks=blocks,
            parent_block_hash=_number(event.parent) if event.parent else None,
            tier=self._common.KV_CACHE_TIER_DEVICE,
            cache_salt=event.salt or None,
        )


def _number(digest: bytes) -> int:
    """The same 64 bits as over ZeroMQ, with a sign: so this contract has it."""
    return int.from_bytes(digest[-8:], "big", signed=True)
