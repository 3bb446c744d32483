"""Client connections at the level of bytes: HTTP/1.1, and as much of HTTP/2 as gRPC needs.

A library would cost the load generator as much as the server that it measures. Each `ask` returns
the bytes of one answer with the times at which they came. It does not know what they mean.
"""

from __future__ import annotations

import asyncio
import re
import struct
import time
from typing import cast

Arrivals = list[tuple[float, bytes]]
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW = 4
_WIDE_OPEN = (1 << 31) - 1


class _Connection(asyncio.Protocol):
    """What both have in common."""

    _transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)


class HttpConnection(_Connection):
    """One HTTP/1.1 connection, kept alive: a request at a time."""

    def __init__(self) -> None:
        self._arrivals: Arrivals = []
        self._done: asyncio.Future[Arrivals] | None = None
        self._end = b""
        self._left: int | None = None

    async def ask(self, content: bytes) -> Arrivals:
        """The answer to a whole request, head included; ConnectionError when it is cut off."""
        self._done = asyncio.get_running_loop().create_future()
        self._arrivals, self._end, self._left = [], b"", None
        self._transport.write(content)
        return await self._done

    def data_received(self, chunk: bytes) -> None:
        self._arrivals.append((time.monotonic(), chunk))
        if self._left is not None:
            self._left -= len(chunk)
        elif found := _LENGTH.search(head := self._end + chunk):
            body = head.find(b"\r\n\r\n")
            if body >= 0:
                self._left = int(found[1]) - (len(head) - body - 4)
        self._end = (self._end + chunk)[-512:]
        is_over = self._left == 0 or (self._left is None and self._end.endswith(_LAST_CHUNK))
        if is_over and self._done is not None and not self._done.done():
            self._done.set_result(self._arrivals)

    def connection_lost(self, failure: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the connection was lost: {failure}"))


class GrpcConnection(_Connection):
    """One HTTP/2 connection on which any number of calls of one method run.

    Requests are small, so that all that wait fit the least window a server may give; its own
    window is as wide as the protocol allows. Headers are written without compression and never
    read: how a call ended shows in what it brought.
    """

    def __init__(self, path: str) -> None:
        fields = (b"\x04", path.encode()), (b"\x01", b"localhost")
        self._head = b"\x83\x86" + b"".join(key + _text(value) for key, value in fields)
        for name, value in ((b"content-type", b"application/grpc"), (b"te", b"trailers")):
            self._head += b"\0" + _text(name) + _text(value)
        self._calls: dict[int, tuple[Arrivals, asyncio.Future[Arrivals]]] = {}
        self._next_id = 1
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        wide = struct.pack(">HI", _INITIAL_WINDOW, _WIDE_OPEN)
        more = struct.pack(">I", _WIDE_OPEN - 65_535)
        self._transport.write(
            _PREFACE + _frame(_SETTINGS, 0, 0, wide) + _frame(_WINDOW, 0, 0, more)
        )

    async def ask(self, content: bytes) -> Arrivals:
        """The messages that answer the message `content`; ConnectionError when they are cut off."""
        number, self._next_id = self._next_id, self._next_id + 2
        done: asyncio.Future[Arrivals] = asyncio.get_running_loop().create_future()
        self._calls[number] = ([], done)
        message = struct.pack(">?I", False, len(content)) + content
        head = _frame(_HEADERS, _END_HEADERS, number, self._head)
        self._transport.write(head + _frame(_DATA, _END_STREAM, number, message))
        return await done

    def data_received(self, chunk: bytes) -> None:
        now, seen, at = time.monotonic(), self._rest + chunk, 0
        while len(seen) - at >= 9:
            size = int.from_bytes(seen[at : at + 3], "big")
            end = at + 9 + size
            if len(seen) < end:
                break
            kind, flags, number = seen[at + 3], seen[at + 4], seen[at + 5 : at + 9]
            self._take(now, kind, flags, int.from_bytes(number, "big"), seen[at + 9 : end])
            at = end
        self._rest = seen[at:]

    def _take(self, now: float, kind: int, flags: int, number: int, content: bytes) -> None:
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, content if kind == _PING else b""))
        elif kind == _GOAWAY:
            self.connection_lost(ConnectionError(f"the server goes away: {content!r}"))
        elif call := self._calls.get(number):
            arrivals, done = call
            if kind == _DATA:
                arrivals.append((now, content))
            if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                del self._calls[number]
                if not done.done():
                    done.set_result(arrivals)

    def connection_lost(self, failure: Exception | None) -> None:
        calls, self._calls = self._calls, {}
        for _, done in calls.values():
            if not done.done():
                done.set_exception(ConnectionError(f"the connection was lost: {failure}"))


def _text(value: bytes) -> bytes:
    """A string of HPACK, as it stands; shorter than 127 bytes."""
    return bytes([len(value)]) + value


def _frame(kind: int, flags: int, number: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, number) + content
