"""Rows that move on together are served as if each had gone by itself.

The reference is the same scheduler without a convoy: `join` refuses everybody, and every row is
planned and settled one by one.
"""

from __future__ import annotations

import gc
import random
import struct
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from engine_service.core.admission import Admission, Capacity
from engine_service.core.convoy import Convoy
from engine_service.core.messages import Abort, Finish, FinishReason, Submit
from engine_service.core.pages import PageManager
from engine_service.core.params import DecodingChoice, SamplingParams, SchedulerLimits
from engine_service.core.request import Request
from engine_service.core.scheduler import Scheduler
from engine_service.core.strategy import ExecutorLimits, ModelFacts
from engine_service.decoding.autoregressive import Autoregressive
from engine_service.simulated import SimulatedExecutor
from tests.equivalence.harness import AR, BLOCK, Setup, ToyEngine
from tests.fakes import ToyModel

VOCAB = 50
MAX_LEN = 96
GIVEN_UP = [FinishReason.ABORTED, FinishReason.STOP_STRING]
ROOMY = {"num_pages": 400, "max_rows": 12, "token_budget": 40}
TIGHT = {"num_pages": 30, "max_rows": 8, "token_budget": 12}
SHORT = {"num_pages": 400, "max_rows": 12, "token_budget": 7}
"""Fewer tokens a step than rows."""


class Served:
    """A crowd from entering to leaving, turn by turn; `depth` steps run beside the host."""

    def __init__(
        self, seed: int, *, depth: int, size: dict[str, int], caching: bool = True
    ) -> None:
        self.rng, self.depth, self.now = random.Random(seed), depth, 10**9
        num_pages, max_rows, budget = size["num_pages"], size["max_rows"], size["token_budget"]
        page_size = self.rng.choice([1, 4, 16]) if size is ROOMY else 4
        strategy = Autoregressive()
        self.pages = PageManager(num_pages, page_size, prefix_caching=caching)
        self.scheduler = Scheduler(
            admission=Admission(
                model=ModelFacts(
                    vocab_size=VOCAB,
                    max_model_len=MAX_LEN,
                    eos_token_ids=(),
                    max_logprobs=5,
                    weight_version="",
                ),
                capacity=Capacity(
                    num_pages=num_pages,
                    page_size=page_size,
                    token_budget=budget,
                    logit_budget=budget,
                    span_logits=budget,
                ),
                strategies={strategy.name: strategy},
                default_method=strategy.name,
                default_params={},
                defaults=SamplingParams(),
                seed=0,
            ),
            pages=self.pages,
            limits=SchedulerLimits(
                max_rows=max_rows,
                token_budget=budget,
                logit_budget=budget,
                canvas_budget=budget,
                max_queued_requests=1000,
                age_bound_s=30.0,
            ),
            clock=lambda: self.now,
        )
        limits = ExecutorLimits(num_pages, page_size, max_rows, MAX_LEN)
        self.executor = SimulatedExecutor(limits, vocab_size=VOCAB, step_s=0.0, never=frozenset())
        self.flights: deque[Any] = deque()
        self.turns: list[Any] = []
        """What every turn told, and how full the engine was."""
        self.goes_on, self.caching = size is ROOMY, caching
        self.prompts: list[list[int]] = []
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.num_steady = self.num_preempted = 0

    def serve(self, num_turns: int) -> Served:
        for _ in range(num_turns):
            self.operate()
            self.turn()
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.turn()
        assert not self.scheduler.has_work
        assert self.pages.num_used == 0
        assert self.finishes.keys() == self.tokens.keys()
        self.num_preempted = sum(f.usage.preemptions for f in self.finishes.values())
        return self

    def operate(self) -> None:
        draw = self.rng.random()
        if draw < 0.3:
            self.submit()
        elif draw < 0.36 and self.tokens:
            key = self.rng.randrange(len(self.tokens))
            self.scheduler.abort(Abort(key, self.rng.choice(GIVEN_UP), 3))

    def submit(self) -> None:
        rng, key = self.rng, len(self.tokens)
        # A third begins like another: units of pages are shared, claimed and waited for.
        first = rng.randrange(3) if rng.random() < 0.3 else key
        prompt = [(first * 7 + i) % VOCAB for i in range(rng.randint(1, 30))]
        if self.goes_on and key and rng.random() < 0.3:  # the next turn of a conversation
            earlier = rng.randrange(key)
            prompt = (self.prompts[earlier] + self.tokens[earlier])[:36]
        self.prompts.append(prompt)
        asked = SamplingParams(
            temperature=0.0,
            max_tokens=rng.randint(5, 60),
            min_tokens=rng.choice([0, 0, 5]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 2]))),
            logprobs=rng.choice([None, None, None, 2]),
        )
        deadline = self.now + rng.randrange(60_000_000) if rng.random() < 0.1 else None
        self.scheduler.submit(
            Submit(
                key=key,
                request_id=str(key),
                prompt=struct.pack(f"<{len(prompt)}I", *prompt),
                sampling=asked,
                decoding=DecodingChoice(method="autoregressive"),
                priority=rng.randrange(3),
                deadline_ns=deadline,
            )
        )
        self.tokens[key] = []

    def turn(self) -> None:
        self.now += 1_000_000
        plan = self.scheduler.schedule()
        spans: set[Any] = set()
        if plan is not None:
            assert len({span.row for span in plan.spans}) == len(plan.spans), "a row runs twice"
            # Rows that are let go in one turn may come back in another order.
            keys = {one.row: key for key, one in self.scheduler._requests.items()}
            spans = {span._replace(row=keys[span.row]) for span in plan.spans}
            self.num_steady += plan.num_spans - len(plan.own_spans)
            self.flights.append((plan, self.executor.launch(plan)))
        if self.flights and (plan is None or len(self.flights) > self.depth):
            oldest, handle = self.flights.popleft()
            self.scheduler.apply(oldest, self.executor.collect(handle))
        self.scheduler.check_integrity()
        load, tokens = self.scheduler.load, self.scheduler.live_tokens
        if self.caching:  # of equal units, which one is shared depends on who comes first in a turn
            load = load._replace(pages_used=0)
        self.turns.append((spans, self.read(), load, tokens))

    def read(self) -> dict[int, Any]:
        output = self.scheduler.emit()
        if output is None:
            return {}
        ids = list(struct.unpack(f"<{sum(output.counts)}I", output.token_ids))
        told: dict[int, Any] = {}
        for key, count in zip(output.keys, output.counts, strict=True):
            assert key not in self.finishes, "something after the end"
            told[key], ids = [ids[:count]], ids[count:]
            self.tokens[key] += told[key][0]
        for row, entries in output.logprobs:
            told[output.keys[row]].append(entries)
        for row, finish in output.finished:
            self.finishes[output.keys[row]] = finish
            told[output.keys[row]].append(finish)
        return told


def alone() -> Any:
    """Nobody joins."""
    return patch.object(Convoy, "join", lambda *_: False)


def both(seed: int, num_turns: int = 120, **options: Any) -> tuple[Served, Served]:
    together = Served(seed, **options).serve(num_turns)
    with alone():
        apart = Served(seed, **options).serve(num_turns)
    assert not apart.num_steady
    return together, apart


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_every_turn_is_the_same(seed: int, depth: int, caching: bool) -> None:
    num_steady = 0
    for offset in range(8):
        together, apart = both(seed + offset, depth=depth, size=ROOMY, caching=caching)
        num_steady += together.num_steady
        for one, other in zip(together.turns, apart.turns, strict=True):
            assert one == other
    assert num_steady > 500, "hardly anybody went in the convoy"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("size", [TIGHT, SHORT])
def test_every_answer_is_the_same_where_rows_or_pages_are_short(
    seed: int, depth: int, size: dict[str, int]
) -> None:
    """Who goes without may differ, and with it the turn of an abort; what is said may not."""
    num_steady = num_preempted = 0
    for offset in range(8):
        together, apart = both(seed + offset, depth=depth, size=size)
        num_steady += together.num_steady
        num_preempted += together.num_preempted
        for key, tokens in together.tokens.items():
            other = apart.tokens[key]
            shared = min(len(tokens), len(other))
            assert tokens[:shared] == other[:shared]
            ends = [run.finishes[key] for run in (together, apart)]
            if {end.reason for end in ends} <= {FinishReason.STOP_TOKEN, FinishReason.LENGTH}:
                assert tokens == other
                assert ends[0].usage.output_tokens == ends[1].usage.output_tokens
    assert num_steady > 200
    assert num_preempted or size is SHORT, "pages never ran short"


@pytest.mark.parametrize("overlaps", [False, True])
def test_whoever_finds_no_budget_beside_the_convoy_leads_next(overlaps: bool) -> None:
    """A block that wants all logits of a step takes turns with a row that wants one of them."""
    setup = Setup(block=8, logit_budget=8, max_model_len=96, overlaps=overlaps)
    engine = ToyEngine(ToyModel(), setup)
    long = engine.submit([1, 2, 3], 80, AR)
    while not len(engine.scheduler.planner.convoy):
        engine.step()
    short = engine.submit([4, 5, 6], 16, BLOCK, {"remasking": "random", "steps": 8})
    while not engine.results[short].finishes:
        engine.step()
    assert len(engine.results[long].tokens) < 40, "it had to wait for the other's end"
    engine.run()


Broken = Callable[[pytest.MonkeyPatch], None]


def stops_are_missed(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Convoy, "_leave_at_stops", lambda *_: None)


def pages_are_forgotten(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Convoy, "note_page", lambda *_: None)


def units_are_forgotten(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Convoy, "note_unit", lambda *_: None)


def passes_are_forgotten(patcher: pytest.MonkeyPatch) -> None:
    real = Convoy.leave

    def leave(self: Convoy, request: Any) -> None:
        before = request.forward_passes
        real(self, request)
        request.forward_passes = before

    patcher.setattr(Convoy, "leave", leave)


def steps_in_flight_are_forgotten(patcher: pytest.MonkeyPatch) -> None:
    real = Convoy.leave

    def leave(self: Convoy, request: Any) -> None:
        before = request.in_flight
        real(self, request)
        request.in_flight = before

    patcher.setattr(Convoy, "leave", leave)


@pytest.mark.parametrize(
    "breaking",
    [
        stops_are_missed,
        pages_are_forgotten,
        units_are_forgotten,
        passes_are_forgotten,
        steps_in_flight_are_forgotten,
    ],
)
def test_control_a_broken_convoy_is_noticed(breaking: Broken) -> None:
    def differs(seed: int) -> bool:
        with pytest.MonkeyPatch.context() as patcher:
            breaking(patcher)
            try:
                together = Served(seed, depth=1, size=ROOMY).serve(120)
            except (AssertionError, KeyError, IndexError):
                return True
        with alone():
            apart = Served(seed, depth=1, size=ROOMY).serve(120)
        return together.turns != apart.turns

    assert any(differs(seed) for seed in range(8))


def test_nobody_stays_who_has_left() -> None:
    """Not even until the step in which it would have reached its length, were that far ahead."""
    served = Served(7, depth=1, size=ROOMY)
    for _ in range(40):
        served.submit()
        for _ in range(6):
            served.turn()
    convoy = served.scheduler.planner.convoy
    left = set(convoy.members)
    assert left
    for key in left:
        served.scheduler.abort(Abort(key, FinishReason.ABORTED, 0))
    for _ in range(30):
        served.turn()
    served.submit()
    for _ in range(6):
        served.turn()
    assert convoy.members
    assert not left & convoy.members.keys()
    gc.collect()
    alive = {one.key for one in gc.get_objects() if type(one) is Request}
    assert alive >= convoy.members.keys()
    assert not left & alive
    assert sum(map(len, convoy._ends.values())) == len(convoy.members)
