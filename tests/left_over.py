"""What this process and its machine have that they did not have before."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.waiting import PATIENCE_S


class Held(NamedTuple):
    """Kinds of open descriptors, threads, and names of shared memory."""

    kinds: Counter[str]
    threads: set[threading.Thread]
    memory: set[str]


def held() -> Held:
    """What there is now, without what earlier tests let go."""
    gc.collect()
    return _held()


def _held() -> Held:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    kinds = [os.readlink(link).partition(":")[0] for link in links if link.is_symlink()]
    return Held(Counter(kinds), set(threading.enumerate()), set(os.listdir("/dev/shm")))


def await_nothing_new(before: Held) -> None:
    """What others have let go since is no fault, and what they name in shared memory goes again."""
    deadline = time.monotonic() + PATIENCE_S
    while any(new := [now - then for now, then in zip(_held(), before, strict=True)]):
        assert time.monotonic() < deadline, f"left over: {new}"
        time.sleep(0.02)
