"""uvicorn's HTTP protocol with bounds for what a client makes us keep, and how long it may take.

uvicorn and httptools keep a head of any size, and wait for the rest of a request for ever. Where a
request offers another protocol they lose its body, of several requests that came at once only the
last one learns that its client left, and a client of HTTP/1.0 gets chunks, which it does not know.
It does not know what is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of a request's head, or of what stands between two pieces of its body or behind the last one. A
head that comes with one read of the socket (256 KiB) is there before it is known to be larger."""
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%b"
)
_LOG = logging.getLogger("tidemill.frontend.http")


def bounded_http(read_timeout_s: float) -> Any:
    """What uvicorn makes for each connection."""
    return partial(BoundedHttp, read_timeout_s=read_timeout_s)


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *given: Any, read_timeout_s: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser: Any = _Http1(self)
        self._read_timeout_s = read_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._num_kept = 0
        """Bytes since the last one that was a body's, or that ended a head or a message."""
        self.same_without_offer = b""
        """The head of a request that offers another protocol, as if it did not: it is to follow."""
        self._unanswered: deque[Any] = deque()
        """Cycles of requests, the one that runs first; those that are answered go with the next."""

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol. Who connects has as long for the first request as for any."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._heard()
        super().connection_lost(exc)
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, received: bytes) -> None:
        """See asyncio.Protocol."""
        self._num_kept += len(received)
        super().data_received(received)
        if self._num_kept > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._expect()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._num_kept = 0
        self.same_without_offer = self._without_offer() if self.parser.should_upgrade() else b""
        if not self.same_without_offer:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                cycle: Any = self.cycle
                cycle.send = _Unframed(cycle)
            while self._unanswered and self._unanswered[0].response_complete:
                self._unanswered.popleft()
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._num_kept = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.same_without_offer:
            return
        self._num_kept = 0
        self._heard()
        super().on_message_complete()

    def _without_offer(self) -> bytes:
        """Nothing of a CONNECT, which is no offer."""
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        if len(kept) == len(self.headers):
            return b""
        version = self.parser.get_http_version().encode()
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
        return b"\r\n".join([first, *(b"%b: %b" % one for one in kept), b"", b""])

    def _expect(self) -> None:
        if self._timer is None and self._read_timeout_s > 0:
            self._timer = self.loop.call_later(self._read_timeout_s, self._expired)

    def _heard(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # it is we who are slow
            self._expect()
            return
        _LOG.info("a request took too long to come", extra=self._who())
        self.transport.close()

    def _refuse(self) -> None:
        _LOG.info("the head of a request is too large", extra=self._who())
        if self.cycle is None or self.cycle.response_complete:
            text = f"the head of a request may have {MAX_HEAD_BYTES} bytes".encode()
            self.transport.write(_TOO_LARGE % (len(text), text))
        self.transport.close()

    def _who(self) -> dict[str, str]:
        return {"client": self.client[0] if self.client else ""}


class _Unframed:
    """What a cycle sends to a client of HTTP/1.0, as nginx was by default: an answer that has no
    length ends where its connection does (RFC 9112, 6.1). In place of the cycle's own `send`."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = False

    async def __call__(self, message: Any) -> None:
        """See ASGI. The cycle keeps count of a length of its own, piece by piece."""
        if message["type"] == "http.response.start":
            names = (name.lower() for name, _ in message.get("headers", ()))
            self._has_length = b"content-length" in names
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class _Http1:
    """Reads requests that offer another protocol (`upgrade: h2c`, as Java's clients do) as those of
    this one, which is what a server without the other does (RFC 9110, 7.8). httptools ends such a
    request with its head, and would take its body for the next one."""

    def __init__(self, connection: BoundedHttp) -> None:
        self._connection = connection
        self._parser = self._fresh()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, received: bytes) -> None:
        """See httptools."""
        rest = memoryview(received)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offered:
                if not (head := self._connection.same_without_offer):
                    raise
                rest = rest[offered.args[0] :]
            self._parser = self._fresh()  # the other may have seen `connection: close`
            self._parser.feed_data(head)

    def _fresh(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._connection)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        return parser
