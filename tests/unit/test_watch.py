"""What the core tells of itself: counts by steps, traced steps, and the first request of all."""

from __future__ import annotations

import pytest

from engine_service.core.loop import CoreLoop
from engine_service.core.messages import STEP_BOUNDS, RankTrace, SetTracing, StepTrace, Tally
from engine_service.core.step import Memory, StepPlan
from engine_service.core.tally import Counting
from engine_service.core.warm_up import warm_up
from engine_service.core.watch import Watch
from tests.equivalence.harness import Setup, ToyEngine
from tests.fakes import ToyModel
from tests.service.fake_core import FACTS
from tests.unit.test_loop import Wire, submit


def run(wire: Wire, turns: int = 40) -> list[object]:
    """A loop that is watched, with a clock that moves by half a second a turn."""
    engine = ToyEngine(ToyModel(0), Setup())
    now = [0.0]
    watch = Watch(engine.scheduler.planner, lambda: Memory(used=7))
    loop = CoreLoop(
        inbox=wire,
        outbox=wire,
        scheduler=engine.scheduler,
        executor=engine.executor,
        watch=watch,
        clock=lambda: now[0],
    )
    for _ in range(turns):
        now[0] += 0.5
        loop.turn()
    return list(wire.sent)


def test_counts_are_told_once_a_second_and_add_up() -> None:
    sent = run(Wire([submit(1, [3, 4, 5], 6), submit(2, [3, 4], 4)]))
    tallies = [one for one in sent if isinstance(one, Tally)]
    assert 15 <= len(tallies) <= 21, "40 turns are 20 s"
    last = tallies[-1]
    assert last.memory.used == 7
    assert sum(last.token_counts) == sum(last.row_counts) == 6, "prompt and five more, side by side"
    assert last.num_tokens == 3 + 2 + 5 + 3
    assert last.num_rows == 6 + 4
    assert (last.prefix_queries, last.num_preemptions, last.denoise_steps) == (5, 0, 0)


def test_steps_are_counted_in_the_bucket_of_the_least_bound_not_below() -> None:
    counting = Counting()
    for tokens in (0, 1, 2, 8, 9, STEP_BOUNDS[-1], STEP_BOUNDS[-1] + 1):
        counting.step(tokens, 1)
    told = counting.told(Memory())
    assert told.token_counts[:3] == (2, 2, 1)
    assert told.token_counts[-2:] == (1, 1)
    assert told.row_counts[0] == 7


@pytest.mark.parametrize(("asked", "wanted"), [((True, 0), 6), ((False, 2), 4), ((False, 0), 0)])
def test_traced_steps(asked: tuple[bool, int], wanted: int) -> None:
    """Those of a traced sequence, or every second one, or none."""
    traced, other = submit(1, [3, 4, 5], 6, traced=True), submit(2, [3], 8)
    sent = run(Wire([SetTracing(*asked), traced, other]))
    steps = [one for one in sent if isinstance(one, StepTrace)]
    assert len(steps) == wanted
    for step in steps:
        assert step.keys == ((1,) if asked[0] else ())
        assert step.planned_ns <= step.launched_ns <= step.collected_ns
        assert step.num_rows == 2 or not asked[0]
    if asked[0]:
        assert steps[0].num_tokens == 3 + 1
        assert steps[0].num_new_rows == 2


def test_what_other_ranks_did_comes_behind_its_step() -> None:
    """However early they are done; and nobody asks them to tell unless somebody wants to know."""
    engine, told = ToyEngine(ToyModel(0), Setup()), list[RankTrace]()
    watch = Watch(engine.scheduler.planner, Memory, lambda: [told.pop() for _ in range(len(told))])
    plan = StepPlan(seq=7, new_rows=(), page_appends=(), own_spans=())
    watch.ask(SetTracing(members=False, every=1))
    assert not watch.launching(plan, 1).is_timed
    watch.collected(plan)
    told.append(RankTrace(7, 1, 2, 3))
    assert [type(one) for one in watch.take(0.0)] == [StepTrace]
    watch.ask(SetTracing(members=False, every=1, ranks=True))
    assert watch.launching(plan, 1).is_timed
    assert watch.take(0.0) == []
    watch.collected(plan)
    assert [type(one) for one in watch.take(0.0)] == [StepTrace, RankTrace]
    assert watch.take(0.0) == []


def test_a_request_runs_before_the_first_one_and_leaves_nothing() -> None:
    engine = ToyEngine(ToyModel(0), Setup())
    assert warm_up(engine.scheduler, engine.executor, FACTS) == 2
    assert not engine.scheduler.has_work
    engine.scheduler.check_integrity()
    assert engine.scheduler.planner.counting.told(Memory()) == Tally()
    # Its stay, with all that is made on first use, is not the measure of those that follow.
    assert engine.scheduler.gate._bounds.wait_s(1, 1) is None


def test_an_engine_whose_first_step_fails_does_not_start() -> None:
    engine = ToyEngine(ToyModel(0), Setup())

    def fail(plan: object) -> object:
        raise RuntimeError("CUDA error: no kernel image")

    engine.executor.launch = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no kernel image"):
        warm_up(engine.scheduler, engine.executor, FACTS)
