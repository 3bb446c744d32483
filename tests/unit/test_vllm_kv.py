"""KV events as gateways read them."""

from __future__ import annotations

import struct

from engine_service.core.journal import CacheCleared, PagesRemoved, PagesStored
from engine_service.server.vllm_engine.convert_kv import CHUNK_EVENTS, KvWire


def stored(first: int, count: int, *, parent: bytes = b"", salt: str = "") -> PagesStored:
    """Units of two tokens, named and filled by their number."""
    numbers = range(first, first + count)
    token_ids = struct.pack(f"<{2 * count}I", *(t for n in numbers for t in (n, n + 100)))
    hashes = tuple(b"rest" + n.to_bytes(8, "big") for n in numbers)
    return PagesStored(hashes, parent, token_ids, 2, salt)


def test_what_a_step_changed() -> None:
    parent = b"rest" + (7).to_bytes(8, "big")
    events = [stored(8, 2, parent=parent, salt="s"), PagesRemoved((parent,)), CacheCleared()]
    batch = KvWire().batch(41, 2.5, events)
    assert (batch.sequence_number, batch.timestamp) == (41, 2.5)
    assert [one.WhichOneof("data") for one in batch.events] == ["stored", "removed", "cleared"]
    assert [one.event_id for one in batch.events] == [0, 1, 2]
    told = batch.events[0].stored
    assert [(b.block_hash, list(b.token_ids), b.block_size) for b in told.blocks] == [
        (8, [8, 108], 2),
        (9, [9, 109], 2),
    ]
    assert (told.parent_block_hash, told.cache_salt) == (7, "s")
    assert list(batch.events[1].removed.block_hashes) == [7]
    assert not batch.HasField("snapshot")


def test_the_first_unit_has_no_parent_and_hashes_have_a_sign() -> None:
    event = PagesStored((b"\xff" * 32,), b"", struct.pack("<2I", 1, 2), 2, "")
    told = KvWire().batch(1, 0.0, [event]).events[0].stored
    assert not told.HasField("parent_block_hash")
    assert not told.HasField("cache_salt")
    assert told.blocks[0].block_hash == -1


def test_a_snapshot_is_numbered_up_to_where_it_was_taken() -> None:
    events = [stored(number, 1) for number in range(CHUNK_EVENTS + 3)]
    first, second = KvWire().snapshot(1000, 0.0, events)
    assert (first.sequence_number, second.sequence_number) == (999, 1000)
    assert first.events[0].HasField("cleared")
    assert not any(one.HasField("cleared") for one in second.events)
    assert (len(first.events), len(second.events)) == (CHUNK_EVENTS + 1, 3)
    for index, chunk in enumerate((first, second)):
        about = chunk.snapshot
        assert (about.index, about.count, about.blocks) == (index, 2, CHUNK_EVENTS + 3)
        assert {one.event_id for one in chunk.events} == {0}


def test_an_empty_index_is_a_snapshot_too() -> None:
    (only,) = KvWire().snapshot(5, 0.0, [])
    assert [one.WhichOneof("data") for one in only.events] == ["cleared"]
    assert (only.sequence_number, only.snapshot.count, only.snapshot.blocks) == (5, 1, 0)
