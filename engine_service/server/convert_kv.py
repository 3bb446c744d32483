"""KV events as messages of the contract (protobuf)."""

from __future__ import annotations

from engine_service.core.journal import CacheCleared, KvEvent, PagesRemoved, PagesStored
from engine_service.server.kv_feed import KvBatch
from tidemill.v1 import engine_pb2 as pb

TIER = "gpu"


def kv_message(batch: KvBatch) -> pb.SubscribeResponse:
    return pb.SubscribeResponse(
        seq=batch.seq,
        gap=batch.gap,
        snapshot=batch.is_snapshot,
        events=[_event(event) for event in batch.events],
    )


def _event(event: KvEvent) -> pb.KvEvent:
    match event:
        case PagesStored(hashes, parent, token_ids, unit, salt):
            stored = pb.PagesStored(
                page_hashes=hashes,
                parent_hash=parent,
                token_ids=token_ids,
                page_size=unit,
                cache_salt=salt,
                tier=TIER,
            )
            return pb.KvEvent(stored=stored)
        case PagesRemoved(hashes):
            return pb.KvEvent(removed=pb.PagesRemoved(page_hashes=hashes, tier=TIER))
        case CacheCleared():
            return pb.KvEvent(cleared=pb.CacheCleared())
