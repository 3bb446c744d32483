"""Ctrl-C between things rather than within them. It does not know what they are."""

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
