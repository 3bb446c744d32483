"""An engine's KV events, as they come: what it stores, drops and clears.

It does not know what they are for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import grpc

from frontend.fleet.prefix_index import Stored
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

Event = Stored | list[bytes] | None
"""Pages stored, names of pages removed, or everything cleared."""


class Batch(NamedTuple):
    """Events up to number `seq`. `is_fresh`: what was known before is void. `is_snapshot`: a piece
    of all there is at `seq`, and another one may follow."""

    seq: int
    is_fresh: bool
    is_snapshot: bool
    events: list[Event]


async def subscribe(channel: grpc.aio.Channel, start_seq: int) -> AsyncIterator[Batch]:
    """Batches from `start_seq` on (0: from a snapshot). Raises the ServiceError that ends it."""
    stub = rpc.KvEventServiceStub(channel)
    stream = stub.Subscribe(pb.SubscribeRequest(start_seq=start_seq))
    try:
        async for answer in stream:
            events = [_event(one) for one in answer.events]
            yield Batch(answer.seq, answer.gap, answer.snapshot, events)
    except grpc.RpcError as failure:
        raise to_error(failure) from failure
    finally:
        stream.cancel()


def _event(event: pb.KvEvent) -> Event:
    kind = event.WhichOneof("kind")
    if kind == "stored":
        told = event.stored
        return Stored(
            tuple(told.page_hashes),
            told.parent_hash,
            told.token_ids,
            told.page_size,
            told.cache_salt,
            told.adapter,
        )
    return None if kind == "cleared" else list(event.removed.page_hashes)
