"""Which leading tokens of a prompt each engine has KV of, as its events tell.

Keys are our own: a chain of digests over salt, adapter and the tokens of each page, because engines
name pages as they like. It does not know connections.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_DIGEST_BYTES = 16
_TOKEN_BYTES = 4
MOST_ORPHANS = 1 << 17
"""Pages of one engine. It drops what it has no room for, so more of them are a mistake of its."""


class Stored(NamedTuple):
    """Pages that follow each other: `hashes[0]` follows the page `parent` (b'' nothing), and
    `packed` are their tokens, little-endian uint32, `page_size` to a page."""

    hashes: Sequence[bytes]
    parent: bytes
    packed: bytes
    page_size: int
    salt: str = ""
    adapter: str = ""


class _Orphans:
    """Pages of one engine whose parent it has not told, or has dropped. One that is dropped itself
    leaves a hole (b'') among those that were told with it: they are found by way of its tokens."""

    def __init__(self) -> None:
        self._by_parent: dict[bytes, dict[int, Stored]] = {}
        self._place_of: dict[bytes, tuple[bytes, int]] = {}
        """By the engine's hash, the oldest first: parent, and number among its children."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._place_of)

    def add(self, stored: Stored) -> None:
        """They wait for `stored.parent`; the oldest go where there are too many."""
        if not stored.hashes:
            return
        number = next(self._numbers)
        for name in stored.hashes:
            self.drop(name)
            self._place_of[name] = (stored.parent, number)
        self._by_parent.setdefault(stored.parent, {})[number] = stored
        while len(self._place_of) > MOST_ORPHANS:
            self.drop(next(iter(self._place_of)))

    def drop(self, name: bytes) -> None:
        """The engine has this page no more."""
        parent, number = self._place_of.pop(name, (b"", 0))
        children = self._by_parent.get(parent, {})
        if (told := children.pop(number, None)) is None:
            return
        hashes = [b"" if one == name else one for one in told.hashes]
        if any(hashes):
            children[number] = told._replace(hashes=hashes)
        elif not children:
            del self._by_parent[parent]

    def take(self, parent: bytes) -> list[Stored]:
        """Those that waited for `parent`, which is known now."""
        found = list(self._by_parent.pop(parent, {}).values())
        for name in (one for stored in found for one in stored.hashes):
            self._place_of.pop(name, None)
        return found


class _Held:
    """The pages of one engine."""

    def __init__(self) -> None:
        self.digest_of: dict[bytes, bytes] = {}
        """By the engine's hash."""
        self.orphans = _Orphans()
        self.page_sizes: set[int] = set()


class PrefixIndex:
    """All engines' pages. Events of one engine come in their order; a snapshot may come in any."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._holders: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        """Different pages."""
        return len(self._holders)

    def store(self, engine: str, stored: Stored) -> None:
        """`engine` has these pages now. Raises ValueError for pages that are not of their tokens:
        of a page without any, no prompt could be looked up, whoever has it."""
        wanted = len(stored.hashes) * stored.page_size * _TOKEN_BYTES
        if stored.page_size < 1 or len(stored.packed) != wanted:
            raise ValueError(
                f"{len(stored.hashes)} pages of {stored.page_size} tokens in "
                f"{len(stored.packed)} bytes; they have 1 token or more, of {_TOKEN_BYTES} bytes"
            )
        held = self._held.setdefault(engine, _Held())
        waiting = [stored]
        while waiting:
            one = waiting.pop()
            if one.parent and one.parent not in held.digest_of:
                held.orphans.add(one)
                continue
            for name in self._add(engine, held, one):
                waiting += held.orphans.take(name)

    def remove(self, engine: str, hashes: Sequence[bytes]) -> None:
        """`engine` has dropped these pages; those behind them stay in its memory, out of reach."""
        held = self._held.get(engine)
        if held is None:
            return
        for name in hashes:
            held.orphans.drop(name)
            digest = held.digest_of.pop(name, None)
            if digest is not None:
                self._drop(engine, digest)

    def forget(self, engine: str) -> None:
        """Nothing is known of `engine` any more."""
        held = self._held.pop(engine, None)
        for digest in held.digest_of.values() if held is not None else ():
            self._drop(engine, digest)

    def hits(self, packed: bytes, salt: str = "", adapter: str = "") -> Mapping[str, int]:
        """Leading tokens of the prompt that each engine has, of those that have any."""
        found: dict[str, int] = {}
        for page_size in {size for held in self._held.values() for size in held.page_sizes}:
            step, digest = page_size * _TOKEN_BYTES, _root(salt, adapter)
            alive: set[str] | None = None
            for stop in range(step, len(packed) + 1, step):
                digest = _next(digest, packed[stop - step : stop])
                holders = self._holders.get(digest, set())
                alive = set(holders) if alive is None else alive & holders
                if not alive:
                    break
                for engine in alive:
                    found[engine] = max(found.get(engine, 0), stop // _TOKEN_BYTES)
        return found

    def _add(self, engine: str, held: _Held, stored: Stored) -> list[bytes]:
        """Adds pages whose parent is known, and returns their names (b'': it is dropped)."""
        held.page_sizes.add(stored.page_size)
        step = stored.page_size * _TOKEN_BYTES
        digest = held.digest_of[stored.parent] if stored.parent else None
        digest = digest or _root(stored.salt, stored.adapter)
        for number, name in enumerate(stored.hashes):
            digest = _next(digest, stored.packed[number * step : (number + 1) * step])
            if not name:
                continue
            before = held.digest_of.get(name)
            if before is not None and before != digest:
                self._drop(engine, before)
            held.digest_of[name] = digest
            self._holders.setdefault(digest, set()).add(engine)
        return list(stored.hashes)

    def _drop(self, engine: str, digest: bytes) -> None:
        holders = self._holders.get(digest, set())
        holders.discard(engine)
        if not holders:
            self._holders.pop(digest, None)


def _root(salt: str, adapter: str) -> bytes:
    return hashlib.blake2b(f"{adapter}\0{salt}".encode(), digest_size=_DIGEST_BYTES).digest()


def _next(digest: bytes, page: bytes) -> bytes:
    return hashlib.blake2b(digest + page, digest_size=_DIGEST_BYTES).digest()
