"""A follower's thread beside its steps: signs of life for rank 0, and an end with it.

It does not know what is loaded or computed.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from engine_service.ranks.broadcast import Reader
from engine_service.ranks.silence import TICK_S, Silence

_LOG = logging.getLogger("tidemill.rank")


class Guard:
    """A thread that shows rank 0 that this process lives, and ends it as soon as rank 0 does."""

    def __init__(
        self,
        plans: Reader,
        leader_pid: int,
        *,
        ends_silent_leader: bool,
        beat: Callable[[], object] | None = None,
    ) -> None:
        """`beat`: what is done four times a second in the place of showing signs of life."""
        self._plans = plans
        self._beat = beat or plans.beat
        self._leader = os.pidfd_open(leader_pid)
        self._ends_silent_leader = ends_silent_leader
        threading.Thread(target=self._run, name="guard", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._leader, select.POLLIN)
        silence, looked = Silence(), time.monotonic()
        while not poll.poll(TICK_S * 1e3):
            self._beat()
            now = time.monotonic()
            serves = self._plans.num_received > 0
            elapsed_s = 0.0 if self._plans.writer_is_away() else now - looked
            silence.look(self._plans.writer_beat(), elapsed_s, serves=serves)
            looked = now
            if self._ends_silent_leader and silence.is_long:
                self._end_leader(silence.seconds)
        os._exit(1)

    def _end_leader(self, seconds: float) -> None:
        """Its server then hears that it was killed, and this process ends with it."""
        _LOG.critical(
            "rank 0 has shown no life for %.1f s, its process is stopped or hangs: killing it",
            seconds,
        )
        signal.pidfd_send_signal(self._leader, signal.SIGKILL)
