"""The waiting queue: its order against sorting anew, and what tenants get of an engine."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from engine_service.core.policy import fair, served
from engine_service.core.policy.fair import FairQueue
from engine_service.core.policy.served import OUTPUT_WEIGHT, PROMPT_WEIGHT


def request(
    rng: random.Random, key: int, *, tenant: str = "", priorities: int = 2, arrival: int = -1
) -> Any:
    return SimpleNamespace(
        key=key,
        priority=rng.randint(0, priorities),
        fairness_key=tenant,
        arrival_ns=rng.randint(0, 30) if arrival < 0 else arrival,
        committed=[0] * rng.randint(1, 5),
        told_len=0,
        started_ns=None,
    )


def plain_order(one: Any, aged_before: int) -> tuple[int, int, int, int]:
    """What a single tenant gets."""
    if one.arrival_ns < aged_before:
        return (0, 0, one.arrival_ns, one.key)
    return (1, -one.priority, one.arrival_ns, one.key)


def test_a_single_tenant_has_priority_then_arrival(seed: int) -> None:
    for offset in range(60):
        rng = random.Random(seed + offset)
        queue, live, aged_before = FairQueue(), {}, -1
        for key in range(40):
            live[key] = request(rng, key)
            queue.add(live[key])
            if rng.random() < 0.4:
                queue.remove(live.pop(rng.choice(list(live))))
            aged_before = max(aged_before, rng.randint(-1, 31) if rng.random() < 0.1 else -1)
            expected = sorted(live.values(), key=lambda r: plain_order(r, aged_before))
            assert list(queue.in_order(aged_before)) == expected
            assert queue.num_tokens == sum(len(r.committed) for r in live.values())
            assert len(queue) == len(live)


def test_the_request_at_hand_may_leave_during_a_look(seed: int) -> None:
    for offset in range(60):
        rng = random.Random(seed + offset)
        queue, tenants = FairQueue(), rng.choice([[""], ["a", "b", "c"]])
        for key in range(12):
            queue.add(request(rng, key, tenant=rng.choice(tenants)))
        expected, seen = {one.key for one in queue}, []
        for one in queue.in_order(rng.randint(-1, 31)):
            seen.append(one.key)
            if rng.random() < 0.5:
                queue.remove(one)
        assert len(seen) == len(set(seen))
        assert set(seen) == expected, "somebody was passed over"
        assert {one.key for one in queue.in_order(-1)} == {one.key for one in queue}


class Engine:
    """Rows that put out a token a step each, filled from the queue. Tenants are backlogged."""

    def __init__(self, rng: random.Random, sizes: dict[str, tuple[int, int]], rows: int) -> None:
        """`sizes`: most tokens of a prompt and of an output, by tenant."""
        self.rng, self.sizes, self.num_rows = rng, sizes, rows
        self.queue = FairQueue()
        self.rows: list[tuple[Any, int]] = []
        self.served: Counter[str] = Counter()
        self.number = 0

    def ask(self, tenant: str, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            one = request(self.rng, self.number, tenant=tenant, priorities=0, arrival=self.number)
            one.committed = [0] * self.rng.randint(1, self.sizes[tenant][0])
            self.queue.add(one)

    def step(self, *, preempts: bool = False) -> None:
        for one in self.queue.in_order(-1):
            if len(self.rows) == self.num_rows:
                break
            is_new, one.started_ns = one.started_ns is None, 0
            cost = len(one.committed) if is_new else 0
            self.queue.start(one, cost)
            self.served[one.fairness_key] += PROMPT_WEIGHT * cost
            most = self.rng.randint(1, self.sizes[one.fairness_key][1])
            self.rows.append((one, len(one.committed) + most))
        for one, stop in list(self.rows):
            one.committed.append(0)
            self.served[one.fairness_key] += OUTPUT_WEIGHT
            if len(one.committed) >= stop:
                self.rows.remove((one, stop))
                self.queue.stop(one)
        if preempts and self.rows and self.rng.random() < 0.05:
            rank = self.queue.ranking(-1)
            victim = max(self.rows, key=lambda row: rank(row[0]))
            self.rows.remove(victim)
            self.queue.stop(victim[0])
            self.queue.add(victim[0])

    @property
    def bound(self) -> int:
        """Theorem of the paper: 2 max(w_p L_input, w_q M), M tokens that are in a batch at most."""
        longest = max(prompt for prompt, _ in self.sizes.values())
        most = max(prompt + output for prompt, output in self.sizes.values())
        return 2 * max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * self.num_rows * most)


def widest_gap(engine: Engine, steps: int, tenants: str, **options: bool) -> int:
    """How far two backlogged tenants get apart, over all intervals."""
    gaps: dict[tuple[str, str], list[int]] = {}
    before = dict(engine.served)
    for _ in range(steps):
        for tenant in tenants:  # always enough in the queue
            waiting = sum(one.fairness_key == tenant for one in engine.queue)
            engine.ask(tenant, max(0, 2 * engine.num_rows - waiting))
        engine.step(**options)
        for a in tenants:
            for b in tenants:
                gap = engine.served[a] - before.get(a, 0) - engine.served[b] + before.get(b, 0)
                gaps.setdefault((a, b), [0]).append(gap)
    return max(max(found) - min(found) for found in gaps.values())


SIZES = {"a": (200, 5), "b": (3, 80), "c": (20, 20)}


@pytest.mark.parametrize("preempts", [False, True])
def test_backlogged_tenants_get_equal_shares_whatever_they_ask(seed: int, preempts: bool) -> None:
    for offset in range(6):
        engine = Engine(random.Random(seed + offset), SIZES, rows=4)
        assert widest_gap(engine, 600, "abc", preempts=preempts) <= engine.bound


def test_control_first_come_first_served_starves(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.Served, "of", lambda self, key: 0)
    monkeypatch.setattr(served.Served, "least", lambda self, key: 0)
    engine = Engine(random.Random(seed), SIZES, rows=4)
    assert widest_gap(engine, 1500, "abc") > engine.bound


def test_time_without_requests_earns_nothing(seed: int) -> None:
    """b comes back after a while; whoever was busy meanwhile is not made to wait for it."""
    engine = Engine(random.Random(seed), SIZES, rows=4)
    widest_gap(engine, 300, "ab")
    while engine.queue or engine.rows:
        engine.step()
    widest_gap(engine, 800, "a")
    assert widest_gap(engine, 400, "ab") <= engine.bound


def test_control_without_the_lift_the_idle_catch_up(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_lift(self: served.Served, key: str, least: int | None, waiting: Any = ()) -> None:
        self._settled.setdefault(key, 0)

    monkeypatch.setattr(served.Served, "lift", no_lift)
    engine = Engine(random.Random(seed), SIZES, rows=4)
    widest_gap(engine, 3000, "a")
    assert widest_gap(engine, 1500, "ab") > engine.bound


def test_a_tenant_with_one_request_passes_the_crowd(seed: int) -> None:
    engine = Engine(random.Random(seed), SIZES, rows=2)
    engine.ask("a", 500)
    for _ in range(50):
        engine.step()
    assert engine.queue.num_ahead(0, "b") == 1
    assert engine.queue.num_ahead(0, "a") > 400
    engine.ask("b")
    assert engine.queue.num_ahead(1, "a") == 0
    for _ in range(10):
        engine.step()
    assert all(one.fairness_key == "a" for one in engine.queue)


def test_the_old_lead_and_share(seed: int) -> None:
    rng, queue = random.Random(seed), FairQueue()
    for key in range(6):
        queue.add(request(rng, key, tenant="a", arrival=key))
    queue.add(request(rng, 6, tenant="b", arrival=6))
    queue.add(request(rng, 7, tenant="b", arrival=50))
    keys = []
    for one in queue.in_order(10):
        queue.start(one, 5)
        keys.append(one.key)
    assert keys[0] == 0
    assert keys[1] == 6, "the other key's turn, though its request came later"
    assert keys[-1] == 7


def test_keys_and_priorities_of_the_past_are_forgotten(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "MAX_IDLE_KEYS", 20)
    monkeypatch.setattr(fair, "MAX_IDLE_LEVELS", 5)
    rng, queue = random.Random(seed), FairQueue()
    for number in range(500):
        one = request(rng, number, tenant=f"tenant {number}", arrival=number)
        one.priority = number // 100 if number < 400 else number
        queue.add(one)
        queue.start(one, 3)
        queue.stop(one)
    assert all(len(level.served._settled) <= 45 for level in queue._levels.values())
    assert len(queue._levels) <= 7


def test_a_full_queue_gives_up_the_youngest_of_the_longest_line(seed: int) -> None:
    rng, queue = random.Random(seed), FairQueue()
    for key in range(4):
        queue.add(request(rng, key, tenant="a", priorities=0, arrival=key))
    found = queue.expendable(0, "b")
    assert found is not None
    assert found.key == 3
    assert queue.expendable(0, "a") is None, "nobody gives way to himself"
    urgent = queue.expendable(1, "a")
    assert urgent is not None
    assert urgent.key == 3
    assert queue.expendable(-1, "b") is None
    queue.add(request(rng, 10, tenant="b", priorities=0, arrival=10))
    queue.add(request(rng, 11, tenant="b", priorities=0, arrival=11))
    queue.add(request(rng, 12, tenant="b", priorities=0, arrival=12))
    assert queue.expendable(0, "b") is None, "it would only be their turn next"


def test_a_lone_tenant_is_never_compared(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a key was served is looked up row by row: nobody pays for it who shares with nobody."""
    engine = Engine(random.Random(seed), SIZES, rows=4)
    engine.ask("a")
    with monkeypatch.context() as patched:
        patched.setattr(served.Served, "of", lambda self, key: pytest.fail("looked up"))
        for _ in range(50):
            engine.ask("a", 3)
            engine.step(preempts=True)
    alone = dict(engine.queue._levels)
    engine.ask("b")
    assert alone[0].served.of("b") == alone[0].served.of("a") > 0, "who comes later owes nothing"


def test_counters_are_those_of_a_look_at_every_request(seed: int) -> None:
    """Some of them compute again what was told before they were preempted."""
    for offset in range(20):
        rng, found = random.Random(seed + offset), served.Served()
        running: list[tuple[Any, int]] = []
        owed: Counter[str] = Counter()
        for key in range(200):
            if running and rng.random() < 0.45:
                one, before = running.pop(rng.randrange(len(running)))
                found.stop(one)
                owed[one.fairness_key] += OUTPUT_WEIGHT * (served.num_told(one) - before)
            else:
                one = request(rng, key, tenant=rng.choice("ab"))
                one.told_len = rng.choice([0, 9])
                found.start(one, len(one.committed))
                owed[one.fairness_key] += PROMPT_WEIGHT * len(one.committed)
                running.append((one, served.num_told(one)))
            for one, _ in running:
                one.committed += [0] * rng.randint(0, 2)
            for tenant in "ab":
                put_out = sum(
                    served.num_told(one) - before
                    for one, before in running
                    if one.fairness_key == tenant
                )
                assert found.of(tenant) == owed[tenant] + OUTPUT_WEIGHT * put_out


def test_who_comes_and_goes_behind_a_crowd_leaves_nothing(seed: int) -> None:
    rng, queue = random.Random(seed), FairQueue()
    queue.add(request(rng, 0, tenant="a", priorities=0, arrival=0))
    for key in range(1, 2000):
        one = request(rng, key, tenant=rng.choice("bcd"), priorities=0, arrival=key)
        queue.add(one)
        queue.remove(one)
    (level,) = queue._levels.values()
    assert len(level._heap) <= 8
    assert [one.key for one in queue.in_order(-1)] == [0]


@pytest.mark.parametrize("crowd", ["crowd", ""])
def test_who_comes_back_has_saved_nothing_up(crowd: str) -> None:
    """Whoever names no key has the empty one, which is a key like others."""
    queue, number, started = FairQueue(), 0, []

    def ask(tenant: str, count: int) -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            one = request(
                random.Random(number), number, tenant=tenant, priorities=0, arrival=number
            )
            one.committed = [0] * 100
            queue.add(one)

    def start(count: int) -> None:
        for _ in range(count):
            one = next(iter(queue.in_order(-1)))
            started.append(one.fairness_key)
            queue.start(one, len(one.committed))

    ask(crowd, 20)  # it always has somebody in the queue
    ask("now and then", 1)
    start(4)
    assert started.count("now and then") == 1
    for _ in range(200):
        ask(crowd, 1)
        start(1)
    ask("now and then", 100)
    ask(crowd, 100)
    started.clear()
    start(60)
    assert abs(started.count(crowd) - 30) <= 1
