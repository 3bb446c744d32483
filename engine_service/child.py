"""What our processes that compute have in common: how they start, live and end.

It does not know what they compute, nor who else there is.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).parents[1]


def start_child(module: str, *, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """`python -m module FD... OUR_PID` in a fresh interpreter (never a fork: gRPC and CUDA do not
    survive one) that inherits nothing but these descriptors."""
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, fds), str(os.getpid())],
        pass_fds=fds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
    )


def pipe_of(words: bytes) -> int:
    """A descriptor that a child reads them from: nobody else sees them, as arguments are seen."""
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "wb") as end:
        end.write(words)
    return ours


def die_with(parent_pid: int) -> None:
    """The kernel kills this process when the thread that started it ends, also while it loads."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("whoever started this process is gone already")


def ignore_stop_signals() -> None:
    """Whoever started this process decides when it ends, not the terminal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


_CALM = (50_000, 20, 20)


def load_calmly() -> None:
    """Python's cycle collector goes seldom through what is being loaded, of which nothing goes: it
    took a tenth of the time of importing torch and our own rooms."""
    gc.set_threshold(*_CALM)


def calm_the_collector() -> None:
    """Keeps Python's cycle collector out of the step.

    With the default thresholds it ran several times a step over everything that loading had made:
    0.4 ms of 2.3 ms host time at 256 rows (measured with torch imported).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_CALM)
