"""A grammar is compiled beside the steps: nobody waits for it, and every key gets one answer."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from engine_service.core.control import Answer, Ask, Pause, PauseMode, Resume
from engine_service.core.handoff import HasRoom
from engine_service.core.loop import CoreLoop
from engine_service.core.messages import Abort, FinishReason, Reject, Shutdown, StepOutput
from engine_service.core.params import ConstraintSpec
from tests.equivalence.harness import Setup, ToyEngine
from tests.equivalence.toy_grammar import ToyGrammars, spec
from tests.fakes import ToyModel
from tests.unit.test_loop import Wire, submit
from tests.waiting import PATIENCE_S
from tidemill.runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable


class SlowGrammars(ToyGrammars):
    """Says that it has begun to compile, and compiles when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_go = threading.Event()
        self.asked: set[str] = set()

    def compile(self, spec: ConstraintSpec) -> None:
        self.asked.add(spec.text)
        self.begun.release()
        self.may_go.wait()
        super().compile(spec)


class Desk:
    """A loop whose wire brings one batch of commands, then nothing."""

    def __init__(self, *commands: object, **setup: int) -> None:
        self.grammars = SlowGrammars()
        self.engine = ToyEngine(ToyModel(1), Setup(**setup), grammars=self.grammars)  # type: ignore[arg-type]
        self.wire = Wire(list(commands))  # type: ignore[arg-type]
        self.loop = CoreLoop(
            inbox=self.wire,
            outbox=self.wire,
            scheduler=self.engine.scheduler,
            executor=self.engine.executor,
            heartbeat_s=0.0,
        )

    def answers(self) -> dict[int, object]:
        """The terminal event of each key that has one."""
        found: dict[int, object] = {}
        for event in self.wire.sent:
            ends = [(event.key, event.error)] if isinstance(event, Reject) else []
            if isinstance(event, StepOutput):
                ends += [(event.keys[row], finish.reason) for row, finish in event.finished]
            for key, what in ends:
                assert key not in found, f"{key} was answered twice"
                found[key] = what
        return found

    def turn_until(self, count: int) -> dict[int, object]:
        """Turns until so many keys are answered."""
        for _ in range(100_000):
            if len(self.answers()) >= count:
                break
            self.loop.turn()
        return self.answers()


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    desk = Desk(submit(1, [1, 2], constraint=spec(4)), submit(2, [1, 2]))
    assert desk.turn_until(1) == {2: FinishReason.LENGTH}
    assert desk.engine.executor.num_steps == 4
    desk.grammars.may_go.set()
    assert set(desk.turn_until(2)) == {1, 2}
    assert not desk.engine.scheduler.has_work


def test_what_does_not_compile_is_rejected_alone() -> None:
    desk = Desk(submit(1, [1, 2], constraint=spec(4)._replace(text="x")), submit(2, [1, 2]))
    desk.grammars.may_go.set()
    answers = desk.turn_until(2)
    assert isinstance(answers[1], InvalidRequest)
    assert answers[1].param == "constraint.regex"
    assert answers[2] is FinishReason.LENGTH


def test_an_abort_that_comes_early_counts() -> None:
    """At once: what is being compiled has nobody who waits for it."""
    desk = Desk(submit(1, [1, 2], constraint=spec(4)), Abort(1), submit(2, [1, 2]))
    assert desk.turn_until(2) == {1: FinishReason.ABORTED, 2: FinishReason.LENGTH}
    assert not desk.engine.scheduler.has_work
    desk.grammars.may_go.set()


def test_nobody_waits_for_grammars_of_aborted_requests() -> None:
    """They were compiled to the end: hours of them, where clients submit and go away."""
    gone = [submit(key, [1, 2], constraint=spec(key)) for key in (1, 2, 3, 4)]
    desk = Desk(*gone, max_queued_requests=4)
    desk.loop.turn()
    for _ in range(2):  # as many as there are threads
        assert desk.grammars.begun.acquire(timeout=PATIENCE_S)
    desk.wire.batches.append([Abort(key) for key in (1, 2, 3, 4)])
    for _ in range(2):
        desk.loop.turn()
    assert desk.answers() == dict.fromkeys((1, 2, 3, 4), FinishReason.ABORTED)
    desk.wire.batches.append([submit(key, [1, 2], constraint=spec(key)) for key in (5, 6, 7)])
    refused = desk.turn_until(5)
    assert isinstance(refused[7], Overloaded), "two threads still compile for nobody"
    desk.grammars.may_go.set()
    assert desk.turn_until(7).keys() == {1, 2, 3, 4, 5, 6, 7}
    assert desk.grammars.asked == {"1", "2", "5", "6"}


def test_who_is_aborted_early_takes_nobodys_place() -> None:
    """The queue is full by the time its grammar is compiled, and it would go ahead of others."""
    early = submit(1, [1, 2], constraint=spec(4), priority=1)
    others = [submit(key, [1, 2]) for key in (2, 3)]
    desk = Desk(early, Abort(1), Ask(9, Pause(PauseMode.KEEP)), *others, max_queued_requests=2)
    desk.loop.turn()
    desk.grammars.may_go.set()
    assert desk.turn_until(1) == {1: FinishReason.ABORTED}
    desk.wire.batches.append([Ask(10, Resume())])
    assert desk.turn_until(3) == dict.fromkeys((2, 3), FinishReason.LENGTH) | {
        1: FinishReason.ABORTED
    }


def test_a_shutdown_answers_what_is_being_prepared() -> None:
    desk = Desk(submit(1, [1, 2], constraint=spec(4)), Shutdown())
    desk.loop.run()
    desk.grammars.may_go.set()
    assert isinstance(desk.answers()[1], Unavailable)


def test_a_pause_that_ends_everything_ends_them() -> None:
    desk = Desk(submit(1, [1, 2], constraint=spec(4)), Ask(9, Pause(PauseMode.ABORT)))
    refused = desk.turn_until(1)[1]
    assert isinstance(refused, Unavailable)
    assert refused.reason == "PAUSED"
    assert [event.ticket for event in desk.wire.sent if isinstance(event, Answer)] == [9]
    desk.grammars.may_go.set()


def test_what_only_looks_like_such_a_pause_ends_nothing() -> None:
    """Named tuples of equal numbers are equal."""
    assert HasRoom(1) == Pause(PauseMode.ABORT)
    desk = Desk(submit(1, [1, 2], constraint=spec(4)), Ask(9, HasRoom(1)))
    desk.grammars.may_go.set()
    assert isinstance(desk.turn_until(1)[1], FinishReason)


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.KEEP])
def test_other_pauses_keep_them(mode: PauseMode) -> None:
    desk = Desk(submit(1, [1, 2], constraint=spec(4)), Ask(9, Pause(mode)))
    desk.grammars.may_go.set()
    for _ in range(100):
        desk.loop.turn()
    assert not desk.answers()
    desk.wire.batches.append([Ask(10, Resume())])
    assert isinstance(desk.turn_until(1)[1], FinishReason)


def test_no_more_grammars_are_compiled_than_requests_may_wait() -> None:
    """Nobody would ever refuse a flood of them else: it is not in the queue yet."""
    flood = [submit(key, [1, 2], constraint=spec(key)) for key in range(1, 6)]
    desk = Desk(*flood, submit(6, [1, 2]), max_queued_requests=3)
    refused = desk.turn_until(3)
    assert refused.keys() == {4, 5, 6}
    for key in (4, 5):
        error = refused[key]
        assert isinstance(error, Overloaded)
        assert "3 requests are waiting" in error.message
        assert error.retry_after_ms is not None
    assert refused[6] is FinishReason.LENGTH
    desk.grammars.may_go.set()
    assert desk.turn_until(6).keys() == {1, 2, 3, 4, 5, 6}


def test_a_deadline_passes_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller hears of it at once; the compilation, which nobody can stop, still counts.

    The clock is the test's, and stands until both compile: what has not begun can be stopped.
    """
    now, soon = [0], 20_000_000
    clock = SimpleNamespace(
        monotonic=time.monotonic, monotonic_ns=lambda: now[0], thread_time_ns=time.thread_time_ns
    )
    monkeypatch.setattr("engine_service.core.loop.time", clock)
    late = submit(1, [1, 2], constraint=spec(4), deadline_ns=soon)
    patient = submit(2, [1, 2], constraint=spec(5))
    desk = Desk(late, patient, max_queued_requests=2)
    desk.loop.turn()
    for _ in range(2):
        assert desk.grammars.begun.acquire(timeout=PATIENCE_S)
    now[0] = soon - 1
    desk.loop.turn()
    assert not desk.answers(), "before its time"
    now[0] = soon
    answers = desk.turn_until(1)
    assert answers.keys() == {1}
    assert isinstance(answers[1], DeadlineExceeded)
    desk.wire.batches.append([submit(3, [1, 2], constraint=spec(6))])
    assert isinstance(desk.turn_until(2)[3], Overloaded)
    desk.grammars.may_go.set()
    assert desk.turn_until(3)[2] is FinishReason.STOP_TOKEN
    assert not desk.engine.scheduler.has_work
