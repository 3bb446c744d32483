"""The index of prefixes against a slow reference that keeps every page's whole prefix."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.engine_convert import pack_ids
from frontend.fleet.prefix_index import PrefixIndex, Stored

PAGE = 2


class ToyEngine:
    """Names pages by numbers of its own and remembers the prefix behind each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages: dict[bytes, tuple[int, ...]] = {}
        self.names: dict[tuple[int, ...], bytes] = {}
        self._count = 0

    def store(self, tokens: list[int]) -> list[Stored]:
        """Pages of a sequence that are new, those that follow each other as one event."""
        told: list[Stored] = []
        parent, is_open = b"", False
        for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
            prefix = tuple(tokens[: start + PAGE])
            name = self.names.get(prefix)
            if name is not None:
                parent, is_open = name, False
                continue
            self._count += 1
            name = f"{self.name}{self._count}".encode()
            self.names[prefix], self.pages[name] = name, prefix
            packed = pack_ids(tokens[start : start + PAGE])
            if is_open:
                last = told.pop()
                told.append(last._replace(hashes=[*last.hashes, name], packed=last.packed + packed))
            else:
                told.append(Stored([name], parent, packed, PAGE))
            parent, is_open = name, True
        return told

    def remove(self, name: bytes) -> None:
        del self.names[self.pages.pop(name)]

    def hit(self, tokens: list[int]) -> int:
        stop = 0
        while (prefix := tuple(tokens[: stop + PAGE])) in self.names and len(prefix) == stop + PAGE:
            stop += PAGE
        return stop


@given(st.integers(0, 2**32), st.booleans())
def test_hits_are_those_of_a_slow_reference(seed: int, shuffles: bool) -> None:
    rng, index = random.Random(seed), PrefixIndex()
    engines = [ToyEngine("a"), ToyEngine("b")]
    for _ in range(25):
        engine = rng.choice(engines)
        tokens = [rng.randrange(2) for _ in range(rng.randrange(9))]
        if rng.random() < 0.2 and engine.pages:
            leaf = max(rng.sample(list(engine.pages), 1), key=lambda n: len(engine.pages[n]))
            engine.remove(leaf)
            index.remove(engine.name, [leaf])
        else:
            for event in engine.store(tokens):
                index.store(engine.name, event)
        found = index.hits(pack_ids(tokens))
        for one in engines:
            assert found.get(one.name, 0) == one.hit(tokens), (tokens, one.name)
    if shuffles:  # a snapshot may tell children before parents
        snapshot, again = [], PrefixIndex()
        for name, prefix in engines[0].pages.items():
            above = engines[0].names.get(prefix[:-PAGE], None) if len(prefix) > PAGE else b""
            if above is not None:
                snapshot.append(Stored([name], above, pack_ids(list(prefix[-PAGE:])), PAGE))
        rng.shuffle(snapshot)
        for event in snapshot:
            again.store("a", event)
        for prefix in engines[0].names:
            assert again.hits(pack_ids(list(prefix))).get("a", 0) == engines[0].hit(list(prefix))


def test_salts_adapters_and_half_pages_share_nothing() -> None:
    index = PrefixIndex()
    packed = pack_ids([1, 2, 3, 4, 5])
    index.store("a", Stored([b"1", b"2"], b"", packed[:16], PAGE, "salt"))
    assert index.hits(packed, "salt") == {"a": 4}
    assert index.hits(packed[:12], "salt") == {"a": 2}
    assert index.hits(packed[:4], "salt") == {}
    assert index.hits(packed) == {}
    assert index.hits(packed, "salt", "adapter") == {}


def test_what_is_forgotten_leaves_nothing() -> None:
    index = PrefixIndex()
    for engine in ("a", "b"):
        index.store(engine, Stored([b"1", b"2"], b"", pack_ids([1, 2, 3, 4]), PAGE))
    index.store("a", Stored([b"9"], b"unknown", pack_ids([1, 2]), PAGE))
    index.forget("a")
    assert index.hits(pack_ids([1, 2, 3, 4])) == {"b": 4}
    index.remove("b", [b"2", b"1", b"never"])
    assert index.hits(pack_ids([1, 2, 3, 4])) == {}
    assert len(index) == 0


def test_dropped_pages_do_not_come_back_with_their_parent() -> None:
    """Their parent may be dropped first, or be told last; it may be computed anew much later."""
    index, packed = PrefixIndex(), pack_ids([1, 2, 3, 4, 5, 6, 7, 8])
    behind = Stored([b"2", b"3", b"4"], b"1", packed[8:], PAGE)
    index.store("a", behind)
    index.remove("a", [b"3"])
    index.store("a", Stored([b"1"], b"", packed[:8], PAGE))
    assert index.hits(packed) == {"a": 4}, "control: 2 had waited for 1"
    index.store("a", behind._replace(hashes=[b"3"], parent=b"2", packed=packed[16:24]))
    assert index.hits(packed) == {"a": 8}, "control: 4 was there, out of reach"
    index.remove("a", [b"1"])
    index.store("a", Stored([b"5"], b"1", pack_ids([9, 9]), PAGE))
    index.remove("a", [b"5"])
    index.store("a", Stored([b"1"], b"", packed[:8], PAGE))
    assert index.hits(pack_ids([1, 2, 9, 9])) == {"a": 2}


@given(st.integers(0, 2**32))
def test_orphans_are_bounded_by_what_the_engine_has(seed: int) -> None:
    """Pages whose parents are dropped and told anew, in any order, against a reference."""
    rng, index = random.Random(seed), PrefixIndex()
    chains = [[rng.randrange(2) for _ in range(4 * PAGE)] for _ in range(3)]
    pages = {tuple(one[:stop]) for one in chains for stop in range(PAGE, len(one) + 1, PAGE)}
    has: set[tuple[int, ...]] = set()
    for _ in range(60):
        page = rng.choice(sorted(pages))
        name, parent = repr(page).encode(), page[:-PAGE]
        if page in has:
            has.discard(page)
            index.remove("a", [name])
        else:
            has.add(page)
            above = repr(parent).encode() if parent else b""
            index.store("a", Stored([name], above, pack_ids(list(page[-PAGE:])), PAGE))
        for one in chains:
            stops = range(PAGE, len(one) + 1, PAGE)
            hit = next((stop - PAGE for stop in stops if tuple(one[:stop]) not in has), len(one))
            assert index.hits(pack_ids(one)).get("a", 0) == hit
        assert len(index._held["a"].orphans) <= len(has)
    index.remove("a", [repr(page).encode() for page in pages])
    assert len(index) == len(index._held["a"].orphans) == 0
    assert not index._held["a"].orphans._by_parent


def test_orphans_are_bounded_whatever_an_engine_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.fleet.prefix_index.MOST_ORPHANS", 10)
    index = PrefixIndex()
    for number in range(100):
        index.store("a", Stored([b"%d" % number], b"p%d" % number, pack_ids([number, 1]), PAGE))
    orphans = index._held["a"].orphans
    assert len(orphans) == len(orphans._by_parent) == 10
    index.store("a", Stored([b"p99"], b"", pack_ids([1, 2]), PAGE))
    assert index.hits(pack_ids([1, 2, 99, 1])) == {"a": 4}, "the newest stay"
