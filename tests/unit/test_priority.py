"""The waiting queue against sorting everything anew for every look."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from engine_service.core.policy.priority import WaitingQueue, order


def request(rng: random.Random, key: int) -> Any:
    return SimpleNamespace(
        key=key,
        priority=rng.randint(0, 2),
        arrival_ns=rng.randint(0, 30),
        committed=[0] * rng.randint(1, 5),
    )


def test_random_queues_are_in_order_while_requests_leave_and_come(seed: int) -> None:
    for offset in range(60):
        rng = random.Random(seed + offset)
        queue, live = WaitingQueue(), {}
        for key in range(40):
            live[key] = request(rng, key)
            queue.add(live[key])
            if rng.random() < 0.4:
                queue.remove(live.pop(rng.choice(list(live))))
            aged_before = rng.randint(-1, 31)
            expected = sorted(live.values(), key=lambda r: order(r, aged_before))
            assert list(queue.in_order(aged_before)) == expected
            assert queue.num_tokens == sum(len(r.committed) for r in live.values())
            assert len(queue) == len(live)


def test_the_request_at_hand_may_leave_during_a_look(seed: int) -> None:
    for offset in range(60):
        rng = random.Random(seed + offset)
        queue = WaitingQueue()
        for key in range(12):
            queue.add(request(rng, key))
        aged_before = rng.randint(-1, 31)
        expected = list(queue.in_order(aged_before))
        seen = []
        for one in queue.in_order(aged_before):
            seen.append(one)
            if rng.random() < 0.5:
                queue.remove(one)
        assert seen == expected
