"""What operators ask of a core, and who answers. It does not know who asks, or how.

Each Ask gets one Answer: at once, or when what it asked for has come true.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from engine_service.core.handoff import TransferAsk
from engine_service.core.journal import KvEvent
from tidemill.runtime.errors import (
    EngineDead,
    FailedPrecondition,
    InternalError,
    ServiceError,
    Unsupported,
)

TRANSFERRING_S = 0.005
"""How long a turn may move pages, beyond the first piece."""
PAUSED = "the engine is paused"
"""What requests are told that a pause ends."""


class PauseMode(IntEnum):
    """Numbers equal those of tidemill.v1.PauseMode."""

    ABORT = 1
    """Ends everything that is queued or runs."""
    WAIT = 2
    """What has started finishes; the rest waits."""
    KEEP = 3
    """Everything stays where it is, with its row and pages."""


class FlushCache(NamedTuple):
    """Forget all prefixes; the answer is the number of pages that were in the index."""


class SnapshotPages(NamedTuple):
    """The answer is a list of KvEvent; from then on the core tells what changes."""


class Pause(NamedTuple):
    """Answered when nothing runs any more. New requests are queued meanwhile."""

    mode: PauseMode


class Resume(NamedTuple):
    """What was paused goes on."""


class StartProfile(NamedTuple):
    directory: str


class StopProfile(NamedTuple):
    """The answer is a list of files."""


Control = FlushCache | SnapshotPages | Pause | Resume | StartProfile | StopProfile | TransferAsk


class Ask(NamedTuple):
    ticket: int
    control: Control


class Answer(NamedTuple):
    ticket: int
    value: Any = None
    error: ServiceError | None = None


class Profiler(Protocol):
    """Records what the device and the host do in steps."""

    def start(self, directory: str) -> None:
        """Raises a ServiceError where it cannot."""

    def stop(self) -> list[str]:
        """Files that were written; raises FailedPrecondition when nothing was started."""


class Controlled(Protocol):
    """What is asked of a scheduler."""

    @property
    def is_still(self) -> bool: ...

    def pause(self, mode: PauseMode) -> None: ...

    def resume(self) -> None: ...

    def flush_cache(self) -> int: ...

    def snapshot_pages(self) -> list[KvEvent]: ...


class Transferring(Protocol):
    """Moves pages (core.transfers)."""

    def take(self, ask: TransferAsk) -> Any:
        """The answer; raises a ServiceError instead."""


class ControlDesk:
    """take, answers."""

    def __init__(
        self,
        scheduler: Controlled,
        profiler: Profiler | None,
        transfers: Transferring | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._profiler = profiler
        self._transfers = transfers
        self._clock = clock
        self._transferring: deque[Ask] = deque()
        self._answers: list[Answer] = []
        self._pausing: list[int] = []
        self._snapshots: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether `answers` would do something that was put off."""
        return bool(self._transferring)

    def take(self, ask: Ask) -> None:
        """Does what is asked, or puts it off if it moves pages; a failure is answered, and hurts
        nobody else."""
        if isinstance(ask.control, TransferAsk):
            self._transferring.append(ask)
            return
        self._try(ask)

    def _try(self, ask: Ask) -> None:
        try:
            self._do(ask)
        except EngineDead:  # other ranks did not do their part, and do nothing any more
            raise
        except ServiceError as error:
            self._answers.append(Answer(ask.ticket, error=error))
        except Exception as bug:  # a profiler that fails must not end the engine
            text = f"{type(ask.control).__name__} failed: {type(bug).__name__}: {bug}"
            self._answers.append(Answer(ask.ticket, error=InternalError(text)))

    def answers(self) -> list[Answer]:
        """Those that are due. Call it once a turn, behind what the turn has told of pages: what a
        snapshot shows is in no event that follows it, and what follows it not in the snapshot.

        Pages are moved here, for TRANSFERRING_S a turn and one piece at least: steps in flight go
        on meanwhile, but stages do them first. Raises EngineDead where a rank was lost over it."""
        if self._snapshots:
            shown = self._scheduler.snapshot_pages()
            self._answers += [Answer(ticket, shown) for ticket in self._snapshots]
            self._snapshots = []
        if self._pausing and self._scheduler.is_still:
            self._answers += [Answer(ticket) for ticket in self._pausing]
            self._pausing = []
        until = self._clock() + TRANSFERRING_S
        while self._transferring:
            self._try(self._transferring.popleft())
            if self._clock() >= until:
                break
        answers, self._answers = self._answers, []
        return answers

    def _do(self, ask: Ask) -> None:
        scheduler = self._scheduler
        value: Any = None
        match ask.control:
            case FlushCache():
                value = scheduler.flush_cache()
            case SnapshotPages():
                self._snapshots.append(ask.ticket)
                return
            case Pause(mode):
                scheduler.pause(mode)
                self._pausing.append(ask.ticket)
                return
            case Resume():
                scheduler.resume()
                self._refuse_pauses()
            case StartProfile(directory):
                self._recorder().start(directory)
            case StopProfile():
                value = self._recorder().stop()
            case transfer:
                value = self._pages().take(transfer)
        self._answers.append(Answer(ask.ticket, value))

    def _refuse_pauses(self) -> None:
        late = FailedPrecondition("the engine was resumed before it stood still", reason="RESUMED")
        self._answers += [Answer(ticket, error=late) for ticket in self._pausing]
        self._pausing = []

    def _pages(self) -> Transferring:
        if self._transfers is None:
            raise FailedPrecondition(
                "this engine moves no KV pages: it is --role both; start it with --role prefill or "
                "--role decode",
                reason="WRONG_ROLE",
            )
        return self._transfers

    def _recorder(self) -> Profiler:
        if self._profiler is None:
            raise Unsupported(
                "the simulated executor computes nothing that could be profiled; "
                "start the engine with --executor=model"
            )
        return self._profiler
