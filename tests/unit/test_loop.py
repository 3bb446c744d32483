"""The loop answers every key once, survives bad requests, and dies of a failing step."""

from __future__ import annotations

import struct
import time
from collections import deque
from typing import Any

import pytest

from engine_service.core.control import Ask
from engine_service.core.handoff import EndTransfer
from engine_service.core.loop import CoreLoop
from engine_service.core.messages import (
    Abort,
    Command,
    Event,
    Fatal,
    FinishReason,
    Reject,
    Shutdown,
    StepOutput,
    Submit,
)
from engine_service.core.params import ConstraintSpec, DecodingChoice, SamplingParams
from engine_service.core.step import StepPlan
from tests.equivalence.harness import Setup, ToyEngine
from tests.equivalence.references import reference_ar
from tests.equivalence.toy_grammar import ToyGrammars, spec
from tests.fakes import ToyModel
from tidemill.runtime.errors import EngineDead, InternalError, InvalidRequest, Overloaded

BURN_S = 0.1
"""CPU time; a turn of the toys takes a hundredth of it."""


class Wire:
    """Inbox and outbox: batches to be read one turn after the other, and what was sent."""

    def __init__(self, *batches: list[Command]) -> None:
        self.batches = deque(batches)
        self.sent: list[Event] = []
        self.waits: list[float] = []

    def receive(self, timeout_s: float) -> list[Command]:
        self.waits.append(timeout_s)
        return self.batches.popleft() if self.batches else []

    def send(self, batch: list[Event]) -> None:
        self.sent += batch


def submit(key: int, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Submit:
    return Submit(
        key=key,
        request_id=f"r{key}",
        prompt=struct.pack(f"<{len(prompt)}I", *prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        decoding=DecodingChoice(),
        **fields,
    )


def build(wire: Wire, **options: Any) -> tuple[CoreLoop, ToyEngine]:
    engine = ToyEngine(ToyModel(0), Setup(**options))
    loop = CoreLoop(inbox=wire, outbox=wire, scheduler=engine.scheduler, executor=engine.executor)
    return loop, engine


def tokens_of(wire: Wire, key: int) -> list[int]:
    tokens: list[int] = []
    for output in wire.sent:
        if isinstance(output, StepOutput) and key in output.keys:
            row = output.keys.index(key)
            ids = struct.unpack(f"<{sum(output.counts)}I", output.token_ids)
            begin = sum(output.counts[:row])
            tokens += ids[begin : begin + output.counts[row]]
    return tokens


def endings(wire: Wire, key: int) -> list[object]:
    found: list[object] = []
    for event in wire.sent:
        if isinstance(event, Reject) and event.key == key:
            found.append(type(event.error))
        if isinstance(event, StepOutput):
            found += [f.reason for row, f in event.finished if event.keys[row] == key]
    return found


def test_commands_become_tokens_and_one_ending_each() -> None:
    wire = Wire(
        [submit(1, [1, 2, 3]), submit(2, []), submit(3, [4, 5], 30)],
        [submit(4, [6])],
        [Abort(3), Abort(99)],
    )
    loop, engine = build(wire)
    for _ in range(10):
        loop.turn()
    assert tokens_of(wire, 1) == reference_ar(ToyModel(0), [1, 2, 3], 4)
    assert tokens_of(wire, 4) == reference_ar(ToyModel(0), [6], 4)
    assert len(tokens_of(wire, 3)) == 2
    assert endings(wire, 1) == [FinishReason.LENGTH] == endings(wire, 4)
    assert endings(wire, 2) == [InvalidRequest]
    assert endings(wire, 3) == [FinishReason.ABORTED]
    assert engine.pages.num_used == 0


@pytest.mark.parametrize("is_aborted", [True, False])
def test_who_leaves_at_once_takes_nobodys_place(is_aborted: bool) -> None:
    """A request that was held back for its KV is let go with its abort right behind it."""
    late = submit(4, [6], fairness_key="a")
    wire = Wire(
        [submit(1, [1, 2, 3], 30, fairness_key="b")],
        [submit(2, [4], fairness_key="b"), submit(3, [5], fairness_key="b")],
        [late, Abort(4)] if is_aborted else [late],
    )
    loop, engine = build(wire, max_rows=1, max_queued_requests=2)
    for _ in range(60):
        loop.turn()
    assert endings(wire, 4) == [FinishReason.ABORTED if is_aborted else FinishReason.LENGTH]
    assert endings(wire, 3) == [FinishReason.LENGTH if is_aborted else Overloaded]
    assert engine.pages.num_used == 0


def test_it_waits_for_commands_only_when_there_is_nothing_to_do() -> None:
    wire = Wire([], [submit(1, [1], 2)])
    loop, _ = build(wire)
    for _ in range(5):
        loop.turn()
    assert wire.waits == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_heartbeats_carry_the_load_while_idle() -> None:
    wire = Wire()
    engine = ToyEngine(ToyModel(0), Setup())
    now = [0.0]
    loop = CoreLoop(
        inbox=wire,
        outbox=wire,
        scheduler=engine.scheduler,
        executor=engine.executor,
        heartbeat_s=0.5,
        clock=lambda: now[0],
    )
    loop.turn()
    assert wire.sent == []
    now[0] = 0.6
    loop.turn()
    loop.turn()
    (beat,) = wire.sent
    assert isinstance(beat, StepOutput)
    assert (beat.keys, beat.load.running, beat.load.pages_total) == ([], 0, 64)


def test_host_time_counts_what_the_loop_does_but_not_its_executor_or_its_waiting() -> None:
    def burn() -> None:
        until = time.thread_time() + BURN_S
        while time.thread_time() < until:
            pass

    wire = Wire([submit(1, [1], 3)], [], [], [], [])
    loop, engine = build(wire)
    real = engine.executor.launch

    def launch(plan: StepPlan) -> Any:
        burn()
        return real(plan)

    engine.executor.launch = launch  # type: ignore[method-assign]
    for _ in range(5):
        loop.turn()
    outputs = [event.load for event in wire.sent if isinstance(event, StepOutput)]
    assert [load.steps for load in outputs] == [1, 2, 3]
    # An output goes out before its own turn is over, so it carries the time of the turns before.
    assert outputs[0].host_ns == 0 < outputs[1].host_ns < outputs[2].host_ns < BURN_S * 1e9

    schedule = engine.scheduler.schedule

    def slow_schedule() -> StepPlan | None:
        burn()
        return schedule()

    engine.scheduler.schedule = slow_schedule  # type: ignore[method-assign]
    wire.batches.append([submit(2, [1], 2)])
    for _ in range(2):
        loop.turn()
    last = [event.load for event in wire.sent if isinstance(event, StepOutput)][-1]
    assert last.steps == 5
    assert last.host_ns > BURN_S * 1e9


def test_shutdown_answers_everybody_and_ends_the_run() -> None:
    wire = Wire([submit(1, [1], 30), submit(2, [2], 30)], [], [Shutdown()])
    loop, engine = build(wire, max_rows=1)
    loop.run()
    assert endings(wire, 1) == endings(wire, 2) == [FinishReason.ABORTED]
    assert len(tokens_of(wire, 1)) == 2
    assert engine.pages.num_used == 0


def test_a_failing_admission_is_one_requests_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire([submit(1, [1]), submit(2, [2])])
    loop, engine = build(wire)
    real = engine.scheduler._admission.admit

    def fail_first(request: Submit) -> Any:
        if request.key == 1:
            raise ZeroDivisionError("a bug")
        return real(request)

    monkeypatch.setattr(engine.scheduler._admission, "admit", fail_first)
    for _ in range(6):
        loop.turn()
    assert endings(wire, 1) == [InternalError]
    assert endings(wire, 2) == [FinishReason.LENGTH]


def test_a_failing_step_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire([submit(1, [1])])
    loop, engine = build(wire)

    def fail(handle: object) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.executor, "collect", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        loop.run()
    assert wire.sent == [Fatal("RuntimeError: device lost")]


class _TornWire(Wire):
    """Its second batch cannot be read."""

    def receive(self, timeout_s: float) -> list[Command]:
        if self.waits:
            raise ValueError("no pickle")
        return super().receive(timeout_s)


def test_what_fails_before_the_step_is_told_too() -> None:
    """The loop ended without a word: callers heard that its process had, not why."""
    wire = _TornWire([submit(1, [1], 2)])
    loop, _ = build(wire)
    with pytest.raises(ValueError, match="no pickle"):
        loop.run()
    assert wire.sent[-1] == Fatal("ValueError: no pickle")


class _NoThreads(ToyGrammars):
    def is_compiled(self, spec: ConstraintSpec) -> bool:
        raise RuntimeError("can't start new thread")


def test_a_grammar_that_cannot_be_begun_is_one_requests_problem() -> None:
    """It ended the engine, as where the system has no more threads."""
    wire = Wire([submit(1, [1], 2, constraint=spec(1)), submit(2, [1], 2)])
    engine = ToyEngine(ToyModel(0), Setup(), grammars=_NoThreads())
    loop = CoreLoop(inbox=wire, outbox=wire, scheduler=engine.scheduler, executor=engine.executor)
    for _ in range(5):
        loop.turn()
    assert endings(wire, 1) == [InternalError]
    assert endings(wire, 2) == [FinishReason.LENGTH]


def test_a_rank_that_is_lost_over_a_transfer_is_fatal_behind_what_the_turn_has_done() -> None:
    class Pages:
        def take(self, ask: object) -> None:
            raise EngineDead("rank 1 was killed")

    engine = ToyEngine(ToyModel(0), Setup())
    wire = Wire([submit(1, [1], 1), Ask(1, EndTransfer(1))])
    parts: dict[str, Any] = {"scheduler": engine.scheduler, "executor": engine.executor}
    loop = CoreLoop(inbox=wire, outbox=wire, transfers=Pages(), **parts)
    with pytest.raises(EngineDead):
        loop.turn()
    assert tokens_of(wire, 1) == reference_ar(ToyModel(0), [1], 1)
    assert endings(wire, 1) == [FinishReason.LENGTH]
    assert wire.sent[-1] == Fatal("EngineDead: rank 1 was killed")
