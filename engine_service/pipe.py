"""How messages travel on the socket pair between the engine server and rank 0.

A frame is a 4-byte length and a pickled batch. Both ends are ours and of one build, so pickle is
safe and needs no schema. What comes from a rank on another host is here only after `ranks.link` has
found it to be of the same start. It does not know the messages.
"""

from __future__ import annotations

import pickle
import select
import socket
import threading
from collections.abc import Iterator, Sequence
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


def pack(message: Any) -> bytes:
    """For `unpack` in a process of the same start."""
    return pickle.dumps(message, protocol=5)


def unpack(packed: bytes) -> Any:
    return pickle.loads(packed)


def frame(batch: Sequence[Any]) -> bytes:
    body = pack(batch)
    return len(body).to_bytes(_LEN, "little") + body


class Splitter:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[Any]:
        """What is in the frames that `chunk` completes, in order."""
        rest = self._rest
        rest += chunk
        found: list[Any] = []
        start = 0
        while len(rest) - start >= _LEN:
            stop = start + _LEN + int.from_bytes(rest[start : start + _LEN], "little")
            if len(rest) < stop:
                break
            found += self._open(memoryview(rest)[start + _LEN : stop])
            start = stop
        if start:
            del rest[:start]
        return found

    def _open(self, body: memoryview) -> Sequence[Any]:
        """Bodies as they are, for who only passes them on."""
        return (bytes(body),)


class Unframer(Splitter):
    """Cuts a byte stream into messages."""

    def _open(self, body: memoryview) -> Sequence[Any]:
        messages: Sequence[Any] = pickle.loads(body)
        return messages


class FramePipe:
    """One end of a pipe between two others, whose frames are passed on unread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, body: bytes) -> None:
        """Blocks while the peer's buffer is full; raises PeerGone. From any thread."""
        try:
            with self._sending:
                self._sock.sendall(len(body).to_bytes(_LEN, "little") + body)
        except OSError as failure:
            raise PeerGone from failure

    def frames(self) -> Iterator[bytes]:
        """Until the other end is closed."""
        splitter = Splitter()
        while chunk := self._receive():
            yield from splitter.feed(chunk)

    def close(self) -> None:
        self._sock.close()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(_READ)
        except OSError:
            return b""


class PeerGone(Exception):
    """The other process closed its end or died."""


class BlockingPipe:
    """The rank's end: no thread and no event loop, so nothing competes with the step.

    Only `last_words` may come from another thread.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._unframer = Unframer()
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, batch: Sequence[Any]) -> None:
        """Blocks while the peer's buffer is full; raises PeerGone."""
        try:
            with self._sending:
                self._sock.sendall(frame(batch))
        except OSError as failure:
            raise PeerGone from failure

    def last_words(self, batch: Sequence[Any], timeout_s: float) -> bool:
        """Sends a short message from any thread, whatever the others are stuck in, and waits until
        the peer has closed its end; False if it has not within `timeout_s`. A frame that another
        thread has begun is not broken into: then nothing is said."""
        if not self._sending.acquire(timeout=timeout_s):
            return False
        try:
            self._sock.send(frame(batch), socket.MSG_DONTWAIT)
        except OSError:
            return False
        finally:
            self._sending.release()
        closed = select.poll()
        closed.register(self._sock, 0)  # an end that is closed is always told
        return bool(closed.poll(timeout_s * 1e3))

    def fileno(self) -> int:
        """To wait for it together with others."""
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def receive(self, timeout_s: float | None = 0.0) -> list[Any]:
        """What has arrived; waits up to `timeout_s` (None: for ever) for the first byte. Raises
        PeerGone behind the last message."""
        wait_ms = None if timeout_s is None else timeout_s * 1e3
        messages: list[Any] = []
        while self._poll.poll(0 if messages else wait_ms):
            try:
                chunk = self._sock.recv(_READ)
            except OSError:
                chunk = b""
            if not chunk and messages:
                break
            if not chunk:
                raise PeerGone
            messages += self._unframer.feed(chunk)
        return messages
