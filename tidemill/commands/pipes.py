"""Whoever reads our output may leave: `tidemill bench | head`. That is no failure of ours, nor is a
disk without room for it."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

LEFT = 128 + signal.SIGPIPE
"""The status of a program that such a pipe has ended."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def while_read(run: Callable[[], int]) -> int:
    """What `run` returns, with all that it printed written; LEFT once nobody reads that any more.
    A connection that broke is told as ever, a full disk in a line."""
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
        for one in left:  # at its end the interpreter writes what is still to be written
            _turn_to_nowhere(one)
        return LEFT
    except OSError as failure:
        if failure.errno not in _NO_ROOM:
            raise
        for one in _outputs():
            _empty(one)
        print(f"tidemill: cannot write: {failure.strerror}", file=sys.stderr)
        return 1


@contextmanager
def unread_progress() -> Iterator[None]:
    """What is run inside goes on when whoever reads stderr leaves: it has a result besides."""
    if sys.stderr is None:  # never open
        yield
        return
    with redirect_stderr(_Unread(sys.stderr)):
        yield


class _Unread:
    """An output as it was, but for a reader that leaves: what follows goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _turn_to_nowhere(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _turn_to_nowhere(self._stream)


def _empty(output: TextIO) -> None:
    try:
        output.flush()
    except OSError:
        _turn_to_nowhere(output)


def _turn_to_nowhere(output: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output.fileno())
    os.close(nowhere)


def _outputs() -> list[TextIO]:
    """Those that were open when the program began."""
    both: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)
    return [one for one in both if one is not None]


def _nobody_reads(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
