"""A follower's process as rank 0 sees it: started fresh, heard over a pipe, ended for certain.

It does not know what followers compute, nor when the group has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine_service.child import start_child
from engine_service.pipe import BlockingPipe, PeerGone, pair
from engine_service.ranks.broadcast import Wires
from engine_service.ranks.clocks import OtherClock
from engine_service.ranks.messages import (
    WEIGHTS,
    Failed,
    Here,
    Loaded,
    PagesAwaited,
    PagesGiven,
    PagesRead,
    PagesTaken,
    Ran,
    Stage,
)
from tidemill.runtime.endings import ending

FOLLOWER_MODULE = "engine_service.follower"
_MOST_TIMES = 1024
"""Timed steps that are kept for whoever asks; nobody asks once tracing is off."""
_KILLED_S = 5.0
"""A process that waits for a broken device may outlive even SIGKILL; it is not waited for."""


class FollowerProcess:
    """`here`, `loaded` and `failed` are what it has said so far; `code` how it has ended."""

    def __init__(
        self, rank: int, wires: Wires, module: str, *, more: Sequence[int] = (), host: str = ""
    ) -> None:
        """Call it in the thread that lives as long as the follower should. `more`: descriptors
        beside the follower's own; `host`: where the rank is, if this process only stands for it.
        """
        self.rank = rank
        self._host = f" on {host}" if host else ""
        ours, theirs = pair()
        with theirs:
            self._process = start_child(module, fds=[theirs.fileno(), *wires, *more])
        self._pipe = BlockingPipe(ours)
        self.pidfd = os.pidfd_open(self._process.pid)
        self._stage = "starting"
        self.here = False
        self.tensors = (0, 0)
        self.has_weights = False
        self.loaded: Loaded | None = None
        self.failed: Failed | None = None
        self.code: int | None = None
        self.times: deque[Ran] = deque(maxlen=_MOST_TIMES)
        self.pages_read: PagesRead | None = None
        self.awaits_pages = False
        self.took_pages = False
        self._clock = OtherClock()
        self._speaks = True

    @property
    def name(self) -> str:
        whose = "here for it: " if self._host else ""
        return f"rank {self.rank}{self._host} ({whose}pid {self._process.pid})"

    @property
    def doubt(self) -> str:
        """For people: why it may be silent."""
        return "its process is stopped or hangs" + (", or the network is cut" * bool(self._host))

    @property
    def has_ended(self) -> bool:
        return self.code is not None

    @property
    def stage(self) -> str:
        """For people: what it was doing."""
        return "" if self.loaded else f" while loading ({self._stage})"

    def watch(self, poll: select.poll) -> None:
        """From now on `poll` wakes when the follower speaks or ends."""
        poll.register(self._pipe.fileno(), select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)

    def tell(self, message: Any) -> None:
        """A follower that is gone is found out elsewhere."""
        with contextlib.suppress(PeerGone):
            self._pipe.send([message])

    def take_pages(self) -> bytearray:
        """What it has read, once."""
        told, self.pages_read = self.pages_read, None
        assert told is not None, f"{self.name} has told no pages"
        return told.content

    def give_pages(self, content: bytearray) -> None:
        """What it waits for, once. Blocks until it has taken most of it; raises PeerGone."""
        self.awaits_pages = self.took_pages = False
        self._pipe.send([PagesGiven(content)])

    def look(self, poll: select.poll) -> None:
        """Takes in what has happened; never waits."""
        if self._speaks:
            try:
                for message in self._pipe.receive(0.0):
                    self._hear(message)
            except PeerGone:
                self._speaks = False
                poll.unregister(self._pipe.fileno())
        if self.code is None:
            self.code = self._process.poll()
            if self.code is not None:
                poll.unregister(self.pidfd)

    def describe_end(self) -> str:
        assert self.code is not None, "it still runs"
        return f"{self.name} {ending(self.code)}{self.stage}"

    def kill(self) -> None:
        if self.code is None:
            self._process.kill()

    def close(self) -> None:
        """Behind `kill`, or when it has ended: nothing of it is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        self._pipe.close()
        os.close(self.pidfd)

    def _here(self, told: Ran) -> Ran:
        """Every host counts its nanoseconds from somewhere else."""
        if not self._host:
            return told
        self._clock.heard(told.done_ns, time.monotonic_ns())
        behind_ns = self._clock.behind_ns
        return Ran(told.seq, told.launched_ns + behind_ns, told.done_ns + behind_ns)

    def _hear(self, message: Any) -> None:
        match message:
            case Ran():
                self.times.append(self._here(message))
            case Stage():
                self.has_weights |= self._stage == WEIGHTS != message.name
                self._stage = message.name
                if message.name == WEIGHTS:
                    self.tensors = message.done, message.total
            case Here():
                self.here = True
            case Loaded():
                self.loaded = message
            case PagesRead():
                self.pages_read = message
            case PagesAwaited():
                self.awaits_pages = True
            case PagesTaken():
                self.took_pages = True
            case Failed():
                self.failed = message
            case _:
                raise TypeError(f"rank {self.rank} sent a {type(message).__name__}")


StartRank = Callable[[int, Wires, str], FollowerProcess]
"""Starts rank number so, which reads there, and runs this module if it is on this host."""
