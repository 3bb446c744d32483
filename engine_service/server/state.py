"""The engine's state as routers see it: one writer, legal moves only, watchers that never block it.

It does not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import NamedTuple

from engine_service.core.messages import Load

NO_LOAD = Load(0, 0, 0, 0, 0)


class EngineState(IntEnum):
    """Numbers equal those of tidemill.v1.EngineState."""

    UNINITIALIZED = 1
    LOADING = 2
    READY = 3
    BUSY = 4
    DRAINING = 5
    SHUTDOWN = 6
    ERROR = 7


_S = EngineState
SERVING = frozenset({_S.READY, _S.BUSY})
_MOVES: dict[EngineState, frozenset[EngineState]] = {
    _S.UNINITIALIZED: frozenset({_S.LOADING}),
    _S.LOADING: frozenset({_S.READY, _S.ERROR}),
    _S.READY: frozenset({_S.BUSY, _S.DRAINING, _S.ERROR}),
    _S.BUSY: frozenset({_S.READY, _S.DRAINING, _S.ERROR}),
    _S.DRAINING: frozenset({_S.SHUTDOWN, _S.ERROR}),
    _S.SHUTDOWN: frozenset(),
    _S.ERROR: frozenset(),
}


class Snapshot(NamedTuple):
    """What WatchState answers. `revision` grows with every change."""

    revision: int
    state: EngineState
    detail: str
    load: Load
    stalled: bool = False
    """The core has said nothing for too long: not ready, but it may recover."""
    paused: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether new work should be sent here."""
        return self.state in SERVING and not self.stalled


class IllegalMove(AssertionError):
    """A state change that the table does not allow: a bug of ours."""


class StateBoard:
    """Holds the current snapshot. `observe` is called by a ticker, at most four times a second, so
    derived changes (READY/BUSY, load) are pushed no faster than that."""

    def __init__(self) -> None:
        self.snapshot = Snapshot(1, EngineState.UNINITIALIZED, "starting", NO_LOAD)
        self._changed = asyncio.Event()

    @property
    def state(self) -> EngineState:
        return self.snapshot.state

    def move(self, state: EngineState, detail: str) -> None:
        """Raises IllegalMove; moving to the current state only changes the detail."""
        if state != self.state and state not in _MOVES[self.state]:
            raise IllegalMove(f"engine state cannot go from {self.state.name} to {state.name}")
        self._publish(self.snapshot._replace(state=state, detail=detail))

    def observe(self, load: Load, detail: str, *, stalled: bool = False) -> None:
        """Derives BUSY (requests run, or wait to) and READY from the load."""
        state = self.state
        if state in SERVING:
            state = EngineState.BUSY if load.running or load.waiting else EngineState.READY
        else:
            detail = self.snapshot.detail
        now = self.snapshot._replace(state=state, detail=detail, load=load, stalled=stalled)
        self._publish(now)

    def pause(self, is_paused: bool) -> None:
        """Nothing new is started while it is paused; the state says what it would else."""
        self._publish(self.snapshot._replace(paused=is_paused))

    def _publish(self, snapshot: Snapshot) -> None:
        if snapshot == self.snapshot:
            return
        self.snapshot = snapshot._replace(revision=snapshot.revision + 1)
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[Snapshot]:
        """The snapshot at once, then the newest after each change; ends after a final state."""
        while True:
            changed, snapshot = self._changed, self.snapshot
            yield snapshot
            if not _MOVES[snapshot.state]:
                return
            if snapshot is self.snapshot:
                await changed.wait()
