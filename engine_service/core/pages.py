"""The page pool: reference counts and the hashed index of prefixes.

It does not know requests, rows or tensors: a page is a number. Pages are indexed in units of
lcm(page_size, mask_block) tokens, because the KV of a page depends on the whole of its block.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from engine_service.core.journal import Journal
from engine_service.core.page_table import NEVER, PageTable, seed_of


class Match(NamedTuple):
    """Leading pages found in the index; `waits_for` is the digest of the next unit when another
    sequence is computing it right now."""

    pages: list[int]
    waits_for: bytes | None


class PageManager:
    """Owns every page. Tables enter with `open`, and leave empty after `release`."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        weight_version: str = "",
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._caching = prefix_caching
        self._weight_version = weight_version
        self._refs = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        """Pages that nobody holds but the index knows; the oldest is evicted first."""
        self._page_of: dict[tuple[bytes, int], int] = {}
        self._key_of: dict[int, tuple[bytes, int]] = {}
        self._claims: dict[bytes, PageTable] = {}
        self._num_flushed = 0
        self.journal = Journal()

    @property
    def num_free(self) -> int:
        """Pages that `reserve` can hand out, evicting indexed ones if need be."""
        return len(self._blank) + len(self._reusable)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def open(self, mask_block: int, salt: str = "") -> PageTable:
        """An empty table. Sequences share pages only under equal mask block, salt and weights."""
        unit = math.lcm(self.page_size, mask_block)
        seed = seed_of(mask_block, self._weight_version, salt)
        table = PageTable(seed, unit, unit // self.page_size, salt)
        table.num_flushed = self._num_flushed
        return table

    def match(self, table: PageTable, token_ids: Sequence[int], limit: int) -> Match:
        """Indexed pages of the longest run of whole units within the first `limit` tokens."""
        pages: list[int] = []
        if not self._caching:
            return Match(pages, None)
        page_of, order = self._page_of, range(table.pages_per_unit)
        for digest in table.hash_units(token_ids, 0, limit // table.unit):
            found = [page_of.get((digest, k)) for k in order]
            known = [page for page in found if page is not None]
            if len(known) < len(found):
                return Match(pages, digest if digest in self._claims else None)
            pages += known
        return Match(pages, None)

    def is_claimed(self, digest: bytes) -> bool:
        """Whether some sequence is computing this unit now."""
        return digest in self._claims

    def adopt(self, table: PageTable, match: Match) -> int:
        """Takes matched pages into an empty table; returns the number of tokens they hold."""
        assert not table.pages, f"table already holds {len(table.pages)} pages"
        assert not table.claim_stop, "table already claims units"
        for page in match.pages:
            if self._refs[page] == 0:
                del self._reusable[page]
            self._refs[page] += 1
        table.pages = list(match.pages)
        table.capacity = len(match.pages) * self.page_size
        table.num_sealed = table.claim_stop = len(match.pages) // table.pages_per_unit
        table.seal_at = (table.num_sealed + 1) * table.unit
        table.num_flushed = self._num_flushed
        return table.capacity

    def claim(self, table: PageTable, token_ids: Sequence[int], limit: int) -> None:
        """Announces that the units within the first `limit` tokens are about to be computed."""
        if not self._caching:
            return
        for digest in table.hash_units(token_ids, table.num_sealed, limit // table.unit):
            self._claims.setdefault(digest, table)
        table.claim_stop = max(table.num_sealed, limit // table.unit)

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Grows the table to hold `num_tokens` positions; changes nothing when it cannot."""
        need = -(-num_tokens // self.page_size) - len(table.pages)
        if need <= 0:
            return True
        if need > self.num_free:
            return False
        for _ in range(need):
            page = self._blank.pop() if self._blank else self._evict()
            self._refs[page] = 1
            table.pages.append(page)
        table.capacity = len(table.pages) * self.page_size
        return True

    def seal(self, table: PageTable, token_ids: Sequence[int], num_cached: int) -> None:
        """Publishes the units whose KV became final: those within the first `num_cached` tokens.

        The price is one hash per new unit, not per step.
        """
        stop = num_cached // table.unit
        if not self._caching:
            table.seal_at = NEVER
        if stop <= table.num_sealed or not self._caching:
            return
        if table.num_flushed == self._num_flushed:
            self._publish(table, table.hash_units(token_ids, table.num_sealed, stop))
        table.num_sealed = stop
        table.seal_at = (stop + 1) * table.unit
        table.claim_stop = max(stop, table.claim_stop)

    def release(self, table: PageTable) -> None:
        """Gives all pages and claims back; indexed pages stay reusable, the last ones go first."""
        for digest in table.digests[table.num_sealed + 1 : table.claim_stop + 1]:
            if self._claims.get(digest) is table:
                del self._claims[digest]
        for page in reversed(table.pages):
            self._refs[page] -= 1
            if self._refs[page] > 0:
                continue
            if page in self._key_of:
                self._reusable[page] = None
            else:
                self._blank.append(page)
        table.pages = []
        table.capacity = table.num_sealed = table.claim_stop = 0
        table.seal_at = table.unit

    def flush(self) -> int:
        """Forgets all prefixes; returns the number of pages that were in the index.

        Pages that sequences hold stay theirs, and will not be shared; nor will those that they
        still write, which depend on them.
        """
        num_pages = len(self._page_of)
        self._blank += self._reusable
        self._reusable.clear()
        self._page_of.clear()
        self._key_of.clear()
        self._claims.clear()
        self._num_flushed += 1
        self.journal.clear()
        return num_pages

    def check_writable(self, table: PageTable, start: int) -> None:
        """Asserts that nobody else can read what is written from position `start` on."""
        for index in range(start // self.page_size, len(table.pages)):
            page = table.pages[index]
            assert self._refs[page] == 1, f"page {page} is written with {self._refs[page]} holders"
            assert page not in self._key_of, f"page {page} is written while it is in the index"

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Asserts every invariant of the pool, given all open tables. For tests and debugging."""
        opened = list(tables)
        held = Counter(chain.from_iterable(table.pages for table in opened))
        used = {page: refs for page, refs in enumerate(self._refs) if refs}
        for page in sorted(used.keys() | held.keys()):
            refs = self._refs[page]
            assert refs == held[page], f"page {page}: {refs} references, {held[page]} holders"
        free = {*self._blank, *self._reusable}
        assert len(free) == len(self._blank) + len(self._reusable), "a page is free twice"
        assert free == set(range(len(self._refs))) - used.keys(), "pages leaked"
        assert all(page in self._key_of for page in self._reusable), "reusable but not indexed"
        assert not any(page in self._key_of for page in self._blank), "blank but indexed"
        inverse = {page: key for key, page in self._page_of.items()}
        assert inverse == self._key_of, "the index and its inverse differ"
        pages_of = Counter(digest for digest, _ in self._page_of)
        told = {digest: unit.num_pages for digest, unit in self.journal._units.items()}
        assert told == pages_of, "the journal tells of another index"
        for table in opened:
            assert len(set(table.pages)) == len(table.pages), "a table holds a page twice"
            assert table.num_sealed * table.pages_per_unit <= len(table.pages), "sealed too much"
            assert table.capacity == len(table.pages) * self.page_size, "capacity is not its pages"
        for digest, table in self._claims.items():
            assert any(table is other for other in opened), "a released table holds a claim"
            claimed = table.digests[table.num_sealed + 1 : table.claim_stop + 1]
            assert digest in claimed, "a claim lies outside its table's range"

    def _publish(self, table: PageTable, digests: Sequence[bytes]) -> None:
        """Units from the first one on that is not sealed."""
        for unit, digest in enumerate(digests, table.num_sealed):
            if self._claims.get(digest) is table:
                del self._claims[digest]
            first_page = unit * table.pages_per_unit
            num_new = 0
            for k in range(table.pages_per_unit):
                num_new += self._index((digest, k), table.pages[first_page + k])
            if num_new:
                self.journal.index(digest, num_new, table.stored(unit), table.pages_per_unit)

    def _index(self, key: tuple[bytes, int], page: int) -> bool:
        """The first page under a key stays; an equal one computed beside it is not shared.

        Whether it is new.
        """
        if key in self._page_of or page in self._key_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def _evict(self) -> int:
        """Takes the page that has been unused for longest out of the index. O(1)."""
        page, _ = self._reusable.popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[key]
        self.journal.evict(key[0])
        return page
