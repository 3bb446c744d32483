"""The page pool under random use, its index, its claims, and what each broken rule does to it."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

import pytest

from engine_service.core.page_table import DIGEST_BYTES, PageTable
from engine_service.core.pages import Match, PageManager


def fill(pages: PageManager, tokens: list[int], mask_block: int = 1, salt: str = "") -> PageTable:
    """A sequence whose tokens are all computed and sealed."""
    table = pages.open(mask_block, salt)
    pages.adopt(table, pages.match(table, tokens, len(tokens)))
    assert pages.reserve(table, len(tokens))
    pages.seal(table, tokens, len(tokens))
    return table


def hits(pages: PageManager, tokens: list[int], mask_block: int = 1, salt: str = "") -> int:
    """Pages that a new sequence would find."""
    return len(pages.match(pages.open(mask_block, salt), tokens, len(tokens)).pages)


class Crowd:
    """Random sequences over few distinct prompts; checks the pool after every operation."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        page_size = rng.choice([1, 3, 4, 8])
        self.pages = PageManager(rng.randint(6, 40), page_size, prefix_caching=rng.random() < 0.9)
        self.prompts = [[rng.randrange(2) for _ in range(60)] for _ in range(3)]
        self.live: list[tuple[PageTable, list[int], list[int]]] = []

    def operate(self) -> None:
        """One of: a sequence enters, grows, seals, is preempted, or ends."""
        rng, pages = self.rng, self.pages
        if not self.live or (len(self.live) < 6 and rng.random() < 0.3):
            tokens = rng.choice(self.prompts)[: rng.randint(1, 60)]
            table = pages.open(rng.choice([1, 4]))
            self.live.append((table, tokens, [0]))
            return
        index = rng.randrange(len(self.live))
        table, tokens, cached = self.live[index]
        action = rng.random()
        if not table.pages and action < 0.5:
            match = pages.match(table, tokens, len(tokens) - 1)
            cached[0] = pages.adopt(table, match)
            if pages.reserve(table, cached[0] + 1):
                pages.claim(table, tokens, len(tokens))
            else:
                pages.release(table)
        elif action < 0.5:
            before = list(table.pages)
            stop = rng.randint(cached[0], len(tokens))
            if pages.reserve(table, stop):
                pages.check_writable(table, cached[0])
                pages.seal(table, tokens, stop)
                cached[0] = max(cached[0], stop // table.unit * table.unit)
            else:
                assert table.pages == before, "a failed reservation changes nothing"
        elif action < 0.8:
            pages.release(table)
        else:
            pages.release(table)
            del self.live[index]

    def check(self) -> None:
        """The invariants of the pool."""
        self.pages.check_integrity(table for table, _, _ in self.live)

    def drain(self) -> None:
        """All sequences end; nothing may be held."""
        for table, _, _ in self.live:
            self.pages.release(table)
        self.pages.check_integrity([])
        assert self.pages.num_used == 0
        assert not self.pages._claims


def churn(seed: int, num_operations: int = 300) -> None:
    """A crowd from entering to leaving."""
    crowd = Crowd(random.Random(seed))
    for _ in range(num_operations):
        crowd.operate()
        crowd.check()
    crowd.drain()


def churn_many(num_crowds: int, seed: int = 0) -> None:
    """Several crowds, one after the other."""
    for offset in range(num_crowds):
        churn(seed + offset)


def test_random_operations_keep_every_invariant(seed: int) -> None:
    churn_many(30, seed)


@pytest.mark.parametrize("broken", ["adopt", "release", "_evict", "claims"])
def test_control_a_broken_pool_is_noticed(broken: str) -> None:
    real_adopt, real_release = PageManager.adopt, PageManager.release

    def adopt(self: PageManager, table: PageTable, match: Match) -> int:
        cached = real_adopt(self, table, match)
        for page in match.pages:
            self._refs[page] = 1
        return cached

    def release(self: PageManager, table: PageTable) -> None:
        table.pages = table.pages[1:]
        real_release(self, table)

    def evict(self: PageManager) -> int:
        page, _ = self._reusable.popitem(last=False)
        return page

    def keep_claims(self: PageManager, table: PageTable) -> None:
        kept = dict(self._claims)
        real_release(self, table)
        self._claims = kept

    fakes = {"adopt": adopt, "release": release, "_evict": evict, "claims": keep_claims}
    name = "release" if broken == "claims" else broken
    broken_pool = patch.object(PageManager, name, fakes[broken])
    with broken_pool, pytest.raises((AssertionError, KeyError)):
        churn_many(30)


def test_a_prefix_is_found_by_whole_units_only() -> None:
    pages = PageManager(32, 4)
    tokens = list(range(22))
    fill(pages, tokens)
    assert hits(pages, tokens) == 5
    assert hits(pages, tokens[:19]) == 4
    assert hits(pages, [*tokens[:9], 99, *tokens[10:]]) == 2
    assert hits(pages, [99, *tokens[1:]]) == 0


def test_rule_g_units_are_the_common_multiple_of_page_and_block() -> None:
    for page_size, block, unit in ((4, 8, 8), (8, 4, 8), (6, 4, 12), (4, 4, 4)):
        pages = PageManager(64, page_size)
        tokens = list(range(40))
        table = fill(pages, tokens, block)
        assert table.unit == unit
        assert hits(pages, tokens, block) == 40 // unit * unit // page_size
        # A difference in the last token of a unit hides the whole unit.
        assert hits(pages, [*tokens[: unit - 1], 99, *tokens[unit:]], block) == 0


def test_other_mask_block_salt_or_weights_is_other_kv() -> None:
    pages = PageManager(64, 4)
    tokens = list(range(16))
    fill(pages, tokens, 4, "a")
    assert hits(pages, tokens, 4, "a") == 4
    assert hits(pages, tokens, 4, "b") == hits(pages, tokens, 4) == hits(pages, tokens, 1, "a") == 0
    seeds = [PageManager(1, 4, weight_version=v).open(1).digests[0] for v in ("x", "y")]
    assert seeds[0] != seeds[1]


def test_the_page_unused_for_longest_is_evicted_first_and_tails_before_heads() -> None:
    pages = PageManager(4, 1)
    old, new = fill(pages, [1, 2]), fill(pages, [3, 4])
    pages.release(old)
    pages.release(new)
    assert (hits(pages, [1, 2]), hits(pages, [3, 4])) == (2, 2)
    taker = pages.open(1)
    assert pages.reserve(taker, 1)
    assert (hits(pages, [1, 2]), hits(pages, [3, 4])) == (1, 2)
    assert pages.reserve(taker, 3)
    assert (hits(pages, [1, 2]), hits(pages, [3, 4])) == (0, 1)
    assert not pages.reserve(taker, 5)
    assert len(taker.pages) == 3


def test_a_unit_with_one_evicted_page_is_not_found() -> None:
    pages = PageManager(4, 4)
    table = fill(pages, list(range(16)), 8)
    pages.release(table)
    assert pages.reserve(pages.open(1), 4)
    assert hits(pages, list(range(16)), 8) == 2


def test_adopted_pages_are_shared_and_survive_their_first_holder() -> None:
    pages = PageManager(8, 4)
    tokens = list(range(12))
    first, second = fill(pages, tokens), fill(pages, tokens)
    assert second.pages == first.pages
    with pytest.raises(AssertionError, match="2 holders"):
        pages.check_writable(second, 8)
    pages.release(first)
    pages.check_integrity([second])
    assert pages.num_used == 3


def test_equal_units_computed_twice_are_not_shared_but_not_lost() -> None:
    pages = PageManager(8, 4)
    tables = [pages.open(1) for _ in range(2)]
    for table in tables:
        assert pages.reserve(table, 8)
    for table in tables:
        pages.seal(table, list(range(8)), 8)
    pages.check_integrity(tables)
    assert hits(pages, list(range(8))) == 2
    pages.release(tables[0])
    pages.release(tables[1])
    pages.check_integrity([])
    assert pages.num_free == 8


def test_rule_i_a_claimed_unit_is_waited_for_until_it_is_sealed_or_given_up() -> None:
    pages = PageManager(16, 4)
    tokens = list(range(12))
    worker = pages.open(1)
    pages.claim(worker, tokens, 12)
    waiting = pages.match(pages.open(1), tokens, 12)
    assert waiting.pages == []
    assert waiting.waits_for is not None
    assert pages.is_claimed(waiting.waits_for)
    assert pages.match(pages.open(1), [99, *tokens], 12).waits_for is None
    assert pages.reserve(worker, 12)
    pages.seal(worker, tokens, 4)
    assert not pages.is_claimed(waiting.waits_for)
    halfway = pages.match(pages.open(1), tokens, 12)
    assert len(halfway.pages) == 1
    assert halfway.waits_for is not None
    pages.release(worker)
    assert pages.match(pages.open(1), tokens, 12).waits_for is None


def test_what_depends_on_flushed_pages_is_not_shared() -> None:
    """A sequence that ran when the weights changed goes on; what it writes then is of both."""
    pages, tokens = PageManager(16, 4), list(range(12))
    old = pages.open(1)
    pages.adopt(old, pages.match(old, tokens, 12))
    pages.claim(old, tokens, 12)
    assert pages.reserve(old, 12)
    pages.seal(old, tokens, 4)
    assert hits(pages, tokens) == 1, "the control"
    pages.flush()
    assert not pages.is_claimed(old.digests[2])
    pages.seal(old, tokens, 12)
    pages.check_integrity([old])
    assert hits(pages, tokens) == 0
    new = fill(pages, tokens[:4])
    assert hits(pages, tokens) == 1, "its own first unit, and none of the old ones behind it"
    pages.release(old)
    pages.check_integrity([new])
    pages.adopt(old, pages.match(old, tokens, 12))  # preempted, and computed anew
    assert pages.reserve(old, 12)
    pages.seal(old, tokens, 12)
    pages.check_integrity([old, new])
    assert hits(pages, tokens) == 3


def test_sealing_hashes_every_unit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = PageManager(64, 4)
    tokens = list(range(64))
    table = pages.open(1)
    hashed: list[int] = []

    def count(content: bytes, *, digest_size: int) -> Any:
        hashed.append(content[DIGEST_BYTES] // 4)
        return blake2b(content, digest_size=digest_size)

    monkeypatch.setattr("engine_service.core.page_table.blake2b", count)
    for length in range(1, 65):
        assert pages.reserve(table, length)
        pages.seal(table, tokens, length)
    assert hashed == list(range(16))
    pages.match(table, tokens, 64)
    assert len(hashed) == 16
    digests = list(table.digests)
    pages.release(table)
    assert table.digests == digests


def test_without_prefix_caching_nothing_is_indexed() -> None:
    pages = PageManager(8, 4, prefix_caching=False)
    table = fill(pages, list(range(8)))
    pages.claim(table, list(range(8)), 8)
    assert hits(pages, list(range(8))) == 0
    pages.release(table)
    pages.check_integrity([])
