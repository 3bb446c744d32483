"""Routing policies over drawn fleets, each with a control that breaks the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.fleet.least_loaded import least_loaded
from frontend.fleet.prefix_affinity import prefix_affinity
from frontend.fleet.round_robin import round_robin
from frontend.fleet.routing import POLICIES
from frontend.fleet.session_affinity import session_affinity
from frontend.fleet.views import LOAD_CAP, EngineView, RequestView, within_cap

ADDRESSES = [f"10.0.0.{i}:50061" for i in range(8)]


@st.composite
def fleets(draw: st.DrawFn) -> list[EngineView]:
    few = st.integers(0, 40)
    addresses = draw(st.lists(st.sampled_from(ADDRESSES), min_size=1, max_size=6, unique=True))
    return [
        EngineView(
            address=address,
            running=draw(few),
            waiting=draw(few),
            waiting_tokens=draw(st.integers(0, 5000)),
            kv_tokens_used=draw(st.integers(0, 4096)),
            kv_tokens=4096,
            max_rows=draw(st.sampled_from([0, 4, 32])),
            max_queued=draw(st.sampled_from([0, 16])),
            sent=draw(st.integers(-10, 20)),
            sent_tokens=draw(st.integers(0, 2000)),
        )
        for address in addresses
    ]


@st.composite
def requests(draw: st.DrawFn) -> RequestView:
    hits = st.dictionaries(st.sampled_from(ADDRESSES), st.integers(0, 512))
    session = st.sampled_from(["", "a", "b"])
    return RequestView(draw(st.integers(0, 1000)), draw(session), draw(hits))


@given(fleets(), requests(), st.randoms())
def test_every_policy_chooses_one_of_them_whatever_their_order(
    engines: list[EngineView], request: RequestView, random: object
) -> None:
    shuffled = list(engines)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for policy in POLICIES.values():
        chosen = policy(engines, request)
        assert chosen in engines
        assert policy(shuffled, request) == chosen


@given(fleets())
def test_round_robin_is_fair(engines: list[EngineView]) -> None:
    counts = Counter(round_robin(engines, RequestView(n)).address for n in range(5 * len(engines)))
    assert set(counts.values()) == {5}
    assert len(counts) == len(engines)


@given(fleets(), requests())
def test_least_loaded_is_never_beaten(engines: list[EngineView], request: RequestView) -> None:
    chosen = least_loaded(engines, request)
    assert all(chosen.demand <= one.demand for one in engines)


def test_idle_engines_share_and_what_was_sent_counts_before_a_report() -> None:
    idle = [EngineView(address, max_rows=4, kv_tokens=100) for address in ADDRESSES[:3]]
    assert {least_loaded(idle, RequestView(n)).address for n in range(3)} == set(ADDRESSES[:3])
    first = idle[0]._replace(sent=1)
    assert least_loaded([first, *idle[1:]], RequestView(0)) != first
    heavy = idle[0]._replace(sent_tokens=90)
    assert least_loaded([heavy, *idle[1:]], RequestView(0)) != heavy
    assert least_loaded(idle, RequestView(0)) == idle[0], "control: it is its load that counts"


@given(fleets())
def test_the_cap_always_leaves_somebody(engines: list[EngineView]) -> None:
    allowed = within_cap(engines)
    assert min(engines, key=lambda one: one.outstanding) in allowed
    mean = sum(one.outstanding for one in engines) / len(engines)
    for one in allowed:
        half = one.max_rows / 2
        assert one.outstanding < max(half, LOAD_CAP * (mean + 1))


def spread(policy: object, hits: dict[str, int], num: int) -> Counter[str]:
    """Sends `num` equal requests that never end to three engines of 16 rows."""
    load = dict.fromkeys(ADDRESSES[:3], 0)
    for number in range(num):
        views = [EngineView(a, sent=n, max_rows=16, kv_tokens=1) for a, n in load.items()]
        load[policy(views, RequestView(number, "s", hits)).address] += 1  # type: ignore[operator]
    return Counter(load)


@pytest.mark.parametrize("policy", [prefix_affinity, session_affinity])
def test_affinity_holds_while_it_is_easy_and_spreads_when_it_is_hot(policy: object) -> None:
    hits = {ADDRESSES[1]: 64}
    assert sorted(spread(policy, hits, 8).values()) == [0, 0, 8]
    hot = spread(policy, hits, 300)
    assert max(hot.values()) <= LOAD_CAP * 100 + 1
    assert min(hot.values()) > 0

    def uncapped(engines: Sequence[EngineView], request: RequestView) -> EngineView:
        return max(engines, key=lambda one: request.hits.get(one.address, 0))

    assert max(spread(uncapped, hits, 300).values()) == 300, "control: without a cap"


@given(fleets(), requests())
def test_prefix_affinity_prefers_the_longest_hit(
    engines: list[EngineView], request: RequestView
) -> None:
    chosen = prefix_affinity(engines, request)
    allowed = within_cap(engines)
    most = max(request.hits.get(one.address, 0) for one in allowed)
    if most:
        assert chosen in allowed
        assert request.hits.get(chosen.address, 0) == most
    else:
        assert chosen == least_loaded(engines, request)


def test_sessions_stay_when_engines_come_and_go() -> None:
    """Rendezvous: only sessions of the engine that left move."""
    idle = [EngineView(address, max_rows=4) for address in ADDRESSES]
    before, after = {}, {}
    for number in range(400):
        name = f"session {number}"
        before[name] = session_affinity(idle, RequestView(number, name)).address
        after[name] = session_affinity(idle[1:], RequestView(0, name)).address
    assert set(before.values()) == set(ADDRESSES)
    moved = {name for name in before if before[name] != after[name]}
    assert moved == {name for name, address in before.items() if address == ADDRESSES[0]}
    modulo = {n: ADDRESSES[hash(n) % 8] != ADDRESSES[1:][hash(n) % 7] for n in before}
    assert sum(modulo.values()) > 200, "control: a plain hash moves most of them"


@given(fleets())
def test_a_queue_counts_what_finds_no_row(engines: list[EngineView]) -> None:
    for one in engines:
        assert 0 <= one.queued <= one.waiting + max(0, one.sent)
        assert one.is_full == (0 < one.max_queued <= one.queued)
    free = EngineView("a", running=2, max_rows=4, max_queued=1, sent=2)
    assert not free.is_full
    assert free._replace(sent=3).is_full
    assert free._replace(waiting=1, sent=0).is_full
