"""What routers are told of the prefix index, against the index, under random traffic."""

from __future__ import annotations

import hashlib
import random
import struct
import time
from unittest.mock import patch

from engine_service.core.journal import CacheCleared, Journal, KvEvent, PagesRemoved, PagesStored
from engine_service.core.page_table import DIGEST_BYTES
from engine_service.core.pages import PageManager
from tests.unit.test_pages import Crowd, fill


class Mirror:
    """A router's picture: token ids and parent of every prefix it was told of."""

    def __init__(self) -> None:
        self.units: dict[bytes, tuple[bytes, bytes]] = {}
        self.twice = 0

    def take(self, events: list[KvEvent]) -> None:
        for event in events:
            match event:
                case PagesStored(hashes, parent, token_ids, unit, _):
                    assert len(token_ids) == 4 * unit * len(hashes)
                    for number, digest in enumerate(hashes):
                        piece = token_ids[4 * unit * number : 4 * unit * (number + 1)]
                        self.twice += digest in self.units
                        self.units[digest] = (parent, piece)
                        parent = digest
                case PagesRemoved(hashes):
                    for digest in hashes:
                        del self.units[digest]
                case CacheCleared():
                    self.units.clear()


def own_index(pages: PageManager) -> set[bytes]:
    """Units whose pages are all in the index, from the index itself."""
    found: dict[bytes, int] = {}
    for digest, _ in pages._page_of:
        found[digest] = found.get(digest, 0) + 1
    return {d for d, count in found.items() if count == pages.journal._units[d].whole}


def differences(seed: int) -> int:
    """Rounds in which a mirror that listens from some moment on shows another index."""
    wrong = 0
    for offset in range(12):
        rng = random.Random(seed + offset)
        crowd, mirror = Crowd(rng), Mirror()
        for _ in range(rng.randint(0, 60)):
            crowd.operate()
        assert crowd.pages.journal.take() == [], "events before anybody listens"
        mirror.take(crowd.pages.journal.snapshot())
        for _ in range(150):
            crowd.operate()
            if rng.random() < 0.02:
                crowd.pages.flush()
                crowd.pages.check_integrity(table for table, *_ in crowd.live)
            mirror.take(crowd.pages.journal.take())
            wrong += mirror.units.keys() != own_index(crowd.pages)
            shown = crowd.pages.journal.snapshot()
            wrong += mirror.units.keys() != {name for told in shown for name in told.hashes}
        late = Mirror()
        late.take(crowd.pages.journal.snapshot())
        wrong += late.units != mirror.units or mirror.twice > 0
    return wrong


def test_a_mirror_shows_the_index_whatever_happens(seed: int) -> None:
    assert differences(seed) == 0


def test_control_an_eviction_that_is_not_told_is_seen(seed: int) -> None:
    def forget(self: Journal, digest: bytes) -> None:
        unit = self._units[digest]
        unit.num_pages -= 1
        if not unit.num_pages:
            del self._units[digest]

    with patch.object(Journal, "evict", forget):
        assert differences(seed) > 0


def test_hashes_form_a_chain_that_a_router_can_compute() -> None:
    pages = PageManager(20, 4, weight_version="w")
    pages.journal.snapshot()
    tokens = list(range(100, 120))
    fill(pages, tokens, mask_block=8, salt="s")
    (stored,) = pages.journal.take()
    assert isinstance(stored, PagesStored)
    assert (stored.unit, stored.parent, stored.salt, len(stored.hashes)) == (8, b"", "s", 2)
    parent = hashlib.blake2b(b"8\0w\0s", digest_size=DIGEST_BYTES).digest()
    for number, digest in enumerate(stored.hashes):
        piece = struct.pack("<8I", *tokens[8 * number : 8 * number + 8])
        parent = hashlib.blake2b(parent + piece, digest_size=DIGEST_BYTES).digest()
        assert digest == parent
    fill(pages, [*tokens[:16], *range(8)], mask_block=8, salt="s")
    (more,) = pages.journal.take()
    assert isinstance(more, PagesStored)
    assert more.parent == stored.hashes[-1], "what was known is not told again"


def test_a_flush_forgets_prefixes_and_takes_no_page_from_anybody() -> None:
    pages = PageManager(8, 4)
    kept = fill(pages, list(range(12)))
    pages.release(fill(pages, list(range(50, 58))))
    assert pages.flush() == 5
    assert pages.flush() == 0
    assert pages.match(pages.open(1), list(range(12)), 12).pages == []
    assert (pages.num_used, len(kept.pages)) == (3, 3)
    pages.check_integrity([kept])
    pages.release(kept)
    pages.check_integrity([])
    assert pages.num_used == 0


def test_a_step_that_stores_or_evicts_many_small_pages_costs_each_of_them_once() -> None:
    """All that a turn had told was copied for each unit: 4 s for these, between two steps."""
    tokens, began = list(range(1 << 15)), time.process_time()
    pages = PageManager(len(tokens), 1)
    pages.journal.snapshot()
    pages.release(fill(pages, tokens))
    (stored,) = pages.journal.take()
    pages.release(fill(pages, [*reversed(tokens)]))
    removed, *_ = pages.journal.take()
    assert isinstance(stored, PagesStored)
    assert stored.token_ids == struct.pack(f"<{len(tokens)}I", *tokens)
    assert isinstance(removed, PagesRemoved)
    assert removed.hashes == stored.hashes[::-1], "the last pages of a prefix go first"
    assert time.process_time() - began < 2.0
