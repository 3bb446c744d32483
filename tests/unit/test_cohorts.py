"""Steps of different rows fill a pipeline of stages, and change no token."""

from __future__ import annotations

import random
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from engine_service.core.cohorts import Cohorts
from engine_service.core.step import StepPlan
from engine_service.stages import Stage
from tests.equivalence.harness import AR, BLOCK, Setup, ToyEngine
from tests.fakes import ToyModel


class Pipeline:
    """Counts when each stage of an engine's executor would compute what: a stage takes as long as
    the step has tokens, the host no time. Asserts that no step is of a row that is still decided
    in another one."""

    def __init__(self, engine: ToyEngine, num_stages: int) -> None:
        self.busy = [0.0] * num_stages
        self.free = [0.0] * num_stages
        self.now = 0.0
        self.most_live = 0
        self._deciding: dict[int, set[int]] = {}
        self._launch, self._collect = engine.executor.launch, engine.executor.collect
        engine.executor.launch, engine.executor.collect = self.launch, self.collect

    def launch(self, plan: StepPlan) -> Any:
        taken = set().union(*self._deciding.values())
        assert not taken & {span.row for span in plan.spans}, "a row is decided in another step"
        self._deciding[plan.seq] = {one.row for one in plan.spans if one.num_decided}
        self.most_live = max(self.most_live, len(self._deciding))
        cost, done = sum(span.num_tokens for span in plan.spans), self.now
        for stage in range(len(self.busy)):
            done = max(done, self.free[stage]) + cost
            self.free[stage] = done
            self.busy[stage] += cost
        return plan.seq, done, self._launch(plan)

    def collect(self, handle: Any) -> Any:
        number, done, result = handle
        del self._deciding[number]
        self.now = max(self.now, done)
        return self._collect(result)

    @property
    def idle(self) -> float:
        """Share of its time that the idlest stage had nothing to do."""
        return 1 - min(self.busy) / max(self.free)


def run(which: int, num_stages: int, **sizes: Any) -> tuple[ToyEngine, Pipeline]:
    """Requests of both methods; the same for a number."""
    rng = random.Random(which)
    setup = Setup(num_stages=num_stages, max_rows=8, num_pages=160, page_size=4, **sizes)
    engine = ToyEngine(ToyModel(which), setup)
    pipeline = Pipeline(engine, num_stages)
    for index in range(11):
        prompt = [rng.randrange(1, 30) for _ in range(rng.randint(1, 20))]
        engine.submit(prompt, rng.randint(10, 50), BLOCK if index % 3 == 0 else AR)
    engine.run()
    return engine, pipeline


def tokens(engine: ToyEngine) -> list[list[int]]:
    return [result.tokens for result in engine.results.values()]


@cache
def whole(which: int) -> list[list[int]]:
    """What no stages answer."""
    return tokens(run(which, 1)[0])


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("overlaps", [False, True])
def test_stages_change_no_token(seed: int, num_stages: int, overlaps: bool) -> None:
    staged, pipeline = run(seed, num_stages, overlaps=overlaps)
    assert tokens(staged) == whole(seed)
    assert num_stages <= pipeline.most_live <= num_stages + overlaps


def test_control_a_row_that_does_not_sit_out_shows() -> None:
    with (
        patch.object(Cohorts, "sits_out", lambda self, request: False),
        pytest.raises(AssertionError, match="decided in another step"),
    ):
        run(0, 2)


def fill(num_stages: int, num_rows: int) -> Pipeline:
    """Rows of one length, which decide a token each in every step. Which one does not matter here:
    one layer of the model is enough."""
    setup = Setup(num_stages=num_stages, max_rows=num_rows, num_pages=300, max_model_len=96)
    engine = ToyEngine(ToyModel(1, layers=1), setup)
    pipeline = Pipeline(engine, num_stages)
    for _ in range(num_rows):
        engine.submit([1, 2], 60)
    engine.run()
    return pipeline


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_stage_works_all_the_time(num_stages: int) -> None:
    pipeline = fill(num_stages, 4 * num_stages)
    assert pipeline.most_live == num_stages
    # The pipe is filled with prompts, of two tokens, and drained: out of 60 rounds.
    assert pipeline.idle < 2 * (num_stages - 1) / (60 * num_stages)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_control_one_step_at_a_time_leaves_stages_idle(num_stages: int) -> None:
    with patch.object(Setup, "depth", 0):
        pipeline = fill(num_stages, 4 * num_stages)
    assert pipeline.most_live == 1
    assert pipeline.idle == pytest.approx(1 - 1 / num_stages, abs=0.02)


def test_control_unequal_steps_leave_stages_idle() -> None:
    with patch.object(Cohorts, "share", lambda self, running, waiting: 6):
        assert fill(2, 8).idle > 0.2


@pytest.mark.parametrize(("num_layers", "count"), [(5, 2), (7, 3), (8, 4), (3, 3)])
def test_stages_hold_all_layers_once(num_layers: int, count: int) -> None:
    held = [Stage(index, count).layers(num_layers) for index in range(count)]
    assert [layer for own in held for layer in own] == list(range(num_layers))
    assert [len(own) for own in held] == sorted((len(own) for own in held), reverse=True)
    assert len(held[0]) - len(held[-1]) <= 1
