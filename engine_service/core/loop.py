"""The core's main loop: drain the inbox, schedule, launch, collect, apply, emit.

As many steps are in flight as the executor has room for while the host works on the next.

It does not know processes or sockets: commands come from an inbox, events go to an outbox.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine_service.core.control import (
    PAUSED,
    Ask,
    ControlDesk,
    Pause,
    PauseMode,
    Profiler,
    Transferring,
)
from engine_service.core.journal import KvEvents
from engine_service.core.messages import (
    Abort,
    Command,
    Event,
    Fatal,
    Reject,
    SetTracing,
    Shutdown,
    Submit,
)
from engine_service.core.preparing import Preparing
from engine_service.core.scheduler import Scheduler
from engine_service.core.step import StepPlan
from engine_service.core.strategy import Executor
from engine_service.core.watch import Watch
from tidemill.runtime.errors import InternalError, ServiceError, Unavailable

HEARTBEAT_S = 1.0
"""Most time between two outputs, idle or not; half of what a session promises its clients."""

HOLDING_S = 0.05
"""How long a paused loop waits for commands before it looks at the deadlines of who is queued."""

PREPARING_S = 0.001
"""How long an idle loop waits for commands before it looks after what is being prepared."""

_log = logging.getLogger(__name__)


class Inbox(Protocol):
    """Where commands come from."""

    def receive(self, timeout_s: float) -> Sequence[Command]:
        """What has arrived; waits up to `timeout_s` for the first."""


class Outbox(Protocol):
    """Where events go."""

    def send(self, batch: Sequence[Event]) -> None:
        """Hands events over, in order."""


class CoreLoop:
    """One turn is one engine step. A failing request is answered; a failing step is fatal."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        outbox: Outbox,
        scheduler: Scheduler,
        executor: Executor,
        watch: Watch | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        profiler: Profiler | None = None,
        transfers: Transferring | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._scheduler = scheduler
        self._executor = executor
        self._controls = ControlDesk(scheduler, profiler, transfers)
        self._watch = watch
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._last_output = clock()
        self._preparing = Preparing()
        self._is_open = True
        self._flights: deque[tuple[StepPlan, Any]] = deque()
        self._depth = executor.depth
        self._num_steps = 0
        self._host_ns = 0
        self._executor_ns = 0

    def run(self) -> None:
        """Turns until a Shutdown command; raises what a step raised after telling Fatal."""
        while self._is_open:
            self.turn()

    def turn(self) -> None:
        """Drains the inbox (waiting for it only when there is nothing to do) and runs one step."""
        steps_before, began = self._num_steps, self._own_time_ns()
        idle_s = HOLDING_S if self._scheduler.is_still else self._heartbeat_s
        idle_s = min(PREPARING_S, idle_s) if self._preparing else idle_s
        is_busy = self._scheduler.has_work or self._controls.has_work
        try:
            self._drain(0.0 if is_busy else idle_s)
            plan = self._step()
            self._tell(self._gather())  # before pages are moved, over which a rank may be lost
            self._tell(self._controls.answers())
        except Exception as failure:
            self._outbox.send([Fatal(f"{type(failure).__name__}: {failure}")])
            raise
        # An idle turn is no step's cost; counting it would also change the load of an idle engine.
        if plan is not None or self._num_steps > steps_before:
            self._host_ns += self._own_time_ns() - began

    def _tell(self, batch: Sequence[Event]) -> None:
        if batch:
            self._outbox.send(batch)

    def _own_time_ns(self) -> int:
        """CPU time of this thread so far, less what the executor took of it."""
        return time.thread_time_ns() - self._executor_ns

    def _step(self) -> StepPlan | None:
        watch = self._watch
        planned_ns = time.monotonic_ns() if watch and watch.is_tracing else 0
        plan = self._scheduler.schedule()
        if plan is not None:
            told = watch.launching(plan, planned_ns) if planned_ns and watch else plan
            began = time.thread_time_ns()
            self._flights.append((plan, self._executor.launch(told)))
            self._executor_ns += time.thread_time_ns() - began
        if self._flights and (plan is None or len(self._flights) > self._depth):
            oldest, handle = self._flights.popleft()
            began = time.thread_time_ns()
            decisions = self._executor.collect(handle)
            self._executor_ns += time.thread_time_ns() - began
            if watch:
                watch.collected(oldest)
            self._scheduler.apply(oldest, decisions)
            self._num_steps += 1
        return plan

    def _gather(self) -> list[Event]:
        """What the turn has to tell but the answers, which go behind it: a snapshot has all changes
        of the index that were told before. Steps go before the output that may end their
        sequences."""
        now = self._clock()
        output = self._scheduler.emit(heartbeat=now - self._last_output >= self._heartbeat_s)
        batch: list[Event] = [] if self._watch is None else [*self._watch.take(now)]
        if output is not None:
            self._last_output = now
            load = output.load._replace(steps=self._num_steps, host_ns=self._host_ns)
            batch.append(output._replace(load=load))
        if changes := self._scheduler.take_kv_events():
            batch.append(KvEvents(self._num_steps, changes))
        return batch

    def _drain(self, timeout_s: float) -> None:
        commands = self._inbox.receive(timeout_s)
        aborted = {command.key for command in commands if isinstance(command, Abort)}
        for command in commands:
            match command:
                case Submit():
                    self._receive(command, is_aborted=command.key in aborted)
                case Abort():
                    if not self._preparing.abort(command):
                        self._scheduler.abort(command)
                case Ask():
                    if isinstance(command.control, Pause):
                        self._pause_prepared(command.control.mode)
                    self._controls.take(command)
                case SetTracing():
                    if self._watch is not None:
                        self._watch.ask(command)
                case Shutdown():
                    self._is_open = False
                    self._scheduler.abort_all("the engine is shutting down")
                    gone = Unavailable("the engine is shutting down", reason="DRAINING")
                    self._refuse_prepared(gone)
        for submit, failure, aborts in self._preparing.take(time.monotonic_ns()):
            self._submit(submit, failure, is_aborted=bool(aborts))
            for abort in aborts:
                self._scheduler.abort(abort)

    def _receive(self, submit: Submit, *, is_aborted: bool) -> None:
        """A grammar is compiled beside the steps; everything else is queued at once. One that
        `is_aborted` by a later command takes no other's place in the queue."""
        try:
            job = self._scheduler.prepare(submit, len(self._preparing))
        except Exception as failure:  # no room, or the system has no more threads
            self._submit(submit, failure)
            return
        if job is None:
            self._submit(submit, is_aborted=is_aborted)
        else:
            self._preparing.add(submit, job)

    def _pause_prepared(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            self._refuse_prepared(Unavailable(PAUSED, reason="PAUSED"))

    def _refuse_prepared(self, why: ServiceError) -> None:
        for submit, *_ in self._preparing.take(0, all_of_them=True):
            self._outbox.send([Reject(submit.key, why)])

    def _submit(
        self, submit: Submit, failure: BaseException | None = None, *, is_aborted: bool = False
    ) -> None:
        """Queues a sequence, or tells its caller why not; the other sequences never notice.

        `failure`: what went wrong before. One that `is_aborted` is queued to be ended at once.
        """
        try:
            if failure is not None:  # what a library panics with is no Exception
                raise failure if isinstance(failure, Exception) else RuntimeError(repr(failure))
            if given_up := self._scheduler.submit(submit, is_aborted=is_aborted):
                self._outbox.send(given_up)
        except ServiceError as error:
            self._outbox.send([Reject(submit.key, error)])
        except Exception as bug:
            _log.exception("admission failed", extra={"request_id": submit.request_id})
            reason = f"admission failed: {type(bug).__name__}: {bug}"
            self._outbox.send([Reject(submit.key, InternalError(reason))])
