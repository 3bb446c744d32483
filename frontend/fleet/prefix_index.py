"""Which leading tokens of a prompt each engine has KV of, as its events tell.

Keys are our own: a chain of digests over salt, adapter and the tokens of each page, because engines
name pages as they like. It does not know connections.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_DIGEST_BYTES = 16
_TOKEN_BYTES = 4


class Stored(NamedTuple):
    """Pages that follow each other: `hashes[0]` follows the page `parent` (b'' nothing), and
    `packed` are their tokens, little-endian uint32, `page_size` to a page."""

    hashes: Sequence[bytes]
    parent: bytes
    packed: bytes
    page_size: int
    salt: str = ""
    adapter: str = ""


class _Held:
    """The pages of one engine."""

    def __init__(self) -> None:
        self.digest_of: dict[bytes, bytes] = {}
        """By the engine's hash."""
        self.orphans: dict[bytes, list[Stored]] = {}
        """Pages whose parent has not been told yet, by the parent."""
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
        """`engine` has these pages now."""
        held = self._held.setdefault(engine, _Held())
        waiting = [stored]
        while waiting:
            one = waiting.pop()
            if one.parent and one.parent not in held.digest_of:
                held.orphans.setdefault(one.parent, []).append(one)
                continue
            for name in self._add(engine, held, one):
                waiting += held.orphans.pop(name, ())

    def remove(self, engine: str, hashes: Sequence[bytes]) -> None:
        """`engine` has dropped these pages; those behind them stay in its memory, out of reach."""
        held = self._held.get(engine)
        if held is None:
            return
        for name in hashes:
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
        """Adds pages whose parent is known, and returns their names."""
        held.page_sizes.add(stored.page_size)
        step = stored.page_size * _TOKEN_BYTES
        digest = held.digest_of[stored.parent] if stored.parent else None
        digest = digest or _root(stored.salt, stored.adapter)
        for number, name in enumerate(stored.hashes):
            digest = _next(digest, stored.packed[number * step : (number + 1) * step])
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
