"""How messages travel on the socket pair between the engine server and rank 0.

A frame is a 4-byte length and a pickled batch. Both ends are ours and of one build, so pickle is
safe and needs no schema. It does not know the messages.
"""

from __future__ import annotations

import pickle
import select
import socket
from collections.abc import Sequence
from typing import Any

_LEN = 4
_READ = 1 << 20
_BUFFER = 4 << 20


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; the death of one is EOF at the other."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


def frame(batch: Sequence[Any]) -> bytes:
    body = pickle.dumps(batch, protocol=5)
    return len(body).to_bytes(_LEN, "little") + body


class Unframer:
    """Cuts a byte stream into batches."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[Any]:
        """The messages that `chunk` completes, in order."""
        rest = self._rest
        rest += chunk
        messages: list[Any] = []
        start = 0
        while len(rest) - start >= _LEN:
            stop = start + _LEN + int.from_bytes(rest[start : start + _LEN], "little")
            if len(rest) < stop:
                break
            messages += pickle.loads(memoryview(rest)[start + _LEN : stop])
            start = stop
        if start:
            del rest[:start]
        return messages


class PeerGone(Exception):
    """The other process closed its end or died."""


class BlockingPipe:
    """The rank's end: no thread and no event loop, so nothing competes with the step."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._unframer = Unframer()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, batch: Sequence[Any]) -> None:
        """Blocks while the peer's buffer is full; raises PeerGone."""
        try:
            self._sock.sendall(frame(batch))
        except OSError as failure:
            raise PeerGone from failure

    def receive(self, timeout_s: float | None = 0.0) -> list[Any]:
        """What has arrived; waits up to `timeout_s` (None: for ever) for the first byte."""
        wait_ms = None if timeout_s is None else timeout_s * 1e3
        messages: list[Any] = []
        while self._poll.poll(0 if messages else wait_ms):
            try:
                chunk = self._sock.recv(_READ)
            except OSError as failure:
                raise PeerGone from failure
            if not chunk:
                raise PeerGone
            messages += self._unframer.feed(chunk)
        return messages
