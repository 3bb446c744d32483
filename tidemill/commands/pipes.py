"""Whoever reads our output may leave: `tidemill bench | head`. That is no failure of ours."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import TextIO

LEFT = 128 + signal.SIGPIPE
"""The status of a program that such a pipe has ended."""


def while_read(run: Callable[[], int]) -> int:
    """What `run` returns, with all that it printed written; LEFT once nobody reads that any more.
    A connection that broke is told as ever."""
    try:
        try:
            return run()
        finally:
            for one in _outputs():
                one.flush()
    except BrokenPipeError:
        left = [one for one in _outputs() if _nobody_reads(one.fileno())]
        if not left:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for one in left:  # at its end the interpreter writes what is still to be written
            os.dup2(nowhere, one.fileno())
        return LEFT


def _outputs() -> list[TextIO]:
    """Those that were open when the program began."""
    both: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)
    return [one for one in both if one is not None]


def _nobody_reads(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
