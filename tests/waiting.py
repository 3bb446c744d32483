"""Waiting for what another task, thread or process does, how long that took while this process was
awake, and ports that stay free meanwhile.

No test takes these bounds when all is well, and none fails because a machine is slow.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

PATIENCE_S = 60.0
"""For anything that is not itself the thing under test."""
FREE_PORTS = range(10_000, 30_000)
"""Below what Linux gives to outgoing connections and to port 0 (32,768 and up)."""
_given: set[int] = set()


async def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Waits for something that another task or process brings about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.005)


def eventually(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """The same for tests without an event loop; fails saying `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


async def awake(seconds: float) -> None:
    """Sleeps for so long without the moments in which the machine stood still: others had as long
    to do something."""
    for _ in range(round(seconds / 0.05)):
        await asyncio.sleep(0.05)


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Reads seconds in which this process was awake. Ranks count each other's silence like that
    (`engine_service.ranks.silence`): a machine that stood still for two seconds is no silence, so
    their bounds do not hold by the clock on the wall."""
    seconds, is_over = 0.0, threading.Event()

    def count() -> None:
        nonlocal seconds
        while not is_over.is_set():
            began = time.monotonic()
            time.sleep(0.05)
            seconds += min(time.monotonic() - began, 0.1)

    counting = threading.Thread(target=count, name="stopwatch", daemon=True)
    counting.start()
    try:
        yield lambda: seconds
    finally:
        is_over.set()
        counting.join()


def free_port(neighbours: int = 1) -> int:
    """A port to be bound later, the first of so many in a row that are all free. One that the
    system chose could be given away again by then; and one of these, by a test beside this one or
    by this one itself."""
    own = _own_ports()
    while True:
        first = random.SystemRandom().choice(own[: 1 - neighbours or None])
        ports = range(first, first + neighbours)
        if _given.isdisjoint(ports) and all(map(_is_free, ports)):
            _given.update(ports)
            return first


def _own_ports() -> range:
    """Those that no other process of pytest-xdist gives."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = len(FREE_PORTS) // count
    return FREE_PORTS[number * size : (number + 1) * size]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def http_client(url: str, **options: object) -> httpx.AsyncClient:
    """A client that waits: httpx gives up after five seconds by itself."""
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, **options)  # type: ignore[arg-type]
