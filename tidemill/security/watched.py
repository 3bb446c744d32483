"""Something that is read from files, and read again when they change.

It does not know what is in them. A change that cannot be read keeps what was read before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_LOG = logging.getLogger("tidemill.security")
Content = TypeVar("Content")
Stamp = tuple[tuple[int, int, int], ...]


class Watched(Generic[Content]):
    """`current()` is what the files hold. Any thread may ask."""

    def __init__(
        self,
        paths: Sequence[str],
        load: Callable[[], Content],
        *,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Loads at once and raises what `load` raises; afterwards only logs it.

        The files are looked at when somebody asks, at most every `interval_s` seconds.
        """
        self._paths = tuple(paths)
        self._load = load
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = self._stamped()
        self._content = load()
        self._looked = clock()
        self._told: tuple[Stamp, str] | None = None
        """Of the last failure that was logged, until all is well again."""

    def current(self) -> Content:
        """What was read last, after reading again if the files have changed since."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= self._interval_s:
                self._looked = now
                self._follow()
            return self._content

    def _follow(self) -> None:
        stamp: Stamp = ()
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return
            self._content = self._load()
        except Exception as failure:  # whatever is wrong with it, the old content still serves
            self._keep(stamp, failure)
        else:
            self._stamp, self._told = stamp, None
            _LOG.info("read again: %s", ", ".join(self._paths))

    def _keep(self, stamp: Stamp, failure: Exception) -> None:
        """Content that is wrong is so until it changes. What could not be opened is tried again at
        every look: neither chmod nor a descriptor that is free again changes a stamp."""
        self._stamp = () if isinstance(failure, OSError) else stamp
        if self._told == (told := (stamp, str(failure))):
            return
        self._told = told
        paths = ", ".join(self._paths)
        _LOG.error("%s changed and cannot be read; what was read before stays: %s", paths, failure)

    def _stamped(self) -> Stamp:
        """Changes when a file is written, replaced, or reached through another link."""
        stats = map(os.stat, self._paths)
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in stats)
