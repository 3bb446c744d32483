"""Starts rank 0 as a process of its own and tells how it ended.

It does not know what the rank does; the pipe carries everything.
"""

from __future__ import annotations

import subprocess

from engine_service import pipe
from engine_service.child import start_child
from tidemill.runtime.endings import ending

RANK_MODULE = "engine_service.rank"
_KILLED_S = 5.0
"""A process that waits for a broken device may outlive even SIGKILL; it is not waited for."""


class RankProcess:
    """A fresh interpreter and our pipe end."""

    def __init__(self, module: str = RANK_MODULE) -> None:
        self.sock, theirs = pipe.pair()
        self._process = start_child(module, fds=[theirs.fileno()])
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def post_mortem(self) -> str:
        """How the process ended; call it when the pipe is closed. Waits for at most 0.5 s:
        a killed process has ended with the last of its threads, its pipe is closed before."""
        code = self._wait(0.5)
        if code is None:
            return "it closed its pipe but still runs"
        return f"its process (pid {self.pid}) {ending(code)}"

    def stop(self, grace_s: float) -> None:
        """Waits for the process to leave by itself, then kills it. Blocking."""
        if self._wait(grace_s) is None:
            self._process.kill()
            self._wait(_KILLED_S)

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
