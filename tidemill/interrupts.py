"""Ctrl-C between things rather than within them, and other ends like it. It does not know what the
things are.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C is heard behind what runs here: in the middle of a step it would leave requests half
    planned, and the next call would find them so. A second one is heard at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if heard:
            before(number, frame)
        heard.append((number, frame))

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:  # an error that comes out of here is its context then
            before(*heard[0])


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end what runs here as an exception does, which undoes what was begun: by
    themselves they end this process alone, and leave those that it has started. Of the main
    thread."""
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
