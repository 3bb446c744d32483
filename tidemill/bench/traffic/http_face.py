"""Streamed chats and completions of any OpenAI-compatible server over HTTP/1.1.

One connection carries a request at a time; an open loop takes as many as it needs. It does not know
when requests begin.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from tidemill.bench.traffic.answer import CONNECTION, OK, Answer
from tidemill.bench.traffic.asked import Asked
from tidemill.bench.traffic.target import Target

_SAID_CHARS = 300
_KEPT_BYTES = 8192
_DONE = b"[DONE]"
_CROSSED_S = 1.0
"""A server that closes an idle connection just when a request is sent has closed it within a round
trip. One that closes it later had the request."""


class HttpFace:
    """Connections to one server that nobody uses at the moment, and how to make another."""

    def __init__(self, target: Target, url: str) -> None:
        parts = urlsplit(url)
        self._target = target
        self._tls = target.context_of(url)
        self._address = parts.hostname or "", parts.port or (443 if self._tls else 80)
        path = parts.path.rstrip("/").removesuffix("/v1")
        path += "/v1/chat/completions" if target.is_chat else "/v1/completions"
        head = [f"POST {path} HTTP/1.1", f"host: {parts.netloc}", "content-type: application/json"]
        if target.api_key:
            head.append(f"authorization: Bearer {target.api_key}")
        self._head = "\r\n".join(head).encode()
        self._idle: list[_Connection] = []

    def write(self, asked: Asked) -> bytes:
        """The whole request."""
        target = self._target
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": asked.output_len,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.ignore_eos:
            body["ignore_eos"] = True
        body |= {"messages": asked.messages} if target.is_chat else {"prompt": asked.prompt}
        text = orjson.dumps(body)
        return self._head + b"\r\ncontent-length: %d\r\n\r\n" % len(text) + text

    async def ask(self, content: bytes, answer: Answer) -> None:
        """Asks on an idle connection, or on a new one if there is none. A connection that the
        server closed while it was idle is replaced. Raises ConnectionError or OSError when none
        can be made; every other end stands in `answer`."""
        while self._idle:
            connection, sent = self._idle.pop(), time.monotonic()
            if not connection.is_open:
                continue
            if await self._asked(connection, content, answer):
                return
            if time.monotonic() - sent > _CROSSED_S:
                break
        else:
            connection = await self._connect()
            if await self._asked(connection, content, answer):
                return
        answer.status, answer.said = CONNECTION, "closed without an answer"

    async def _asked(self, connection: _Connection, content: bytes, answer: Answer) -> bool:
        """False when the connection ended before a byte came."""
        try:
            has_begun = await connection.ask(content, answer)
        finally:
            if connection.may_be_kept:
                self._idle.append(connection)
            else:
                connection.close()
        return has_begun

    async def _connect(self) -> _Connection:
        host, port = self._address
        loop = asyncio.get_running_loop()
        name = host if self._tls else None
        _, made = await loop.create_connection(
            _Connection, host, port, ssl=self._tls, server_hostname=name
        )
        return made

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Connection(asyncio.Protocol):
    """Feeds what comes to the answer of the request that was sent last."""

    def __init__(self) -> None:
        self.is_open = False
        self.may_be_kept = False
        self._transport: asyncio.WriteTransport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._over: asyncio.Future[None] | None = None
        self._reader = EventReader(Answer(0.0))
        self._has_begun = self._is_whole = False

    async def ask(self, content: bytes, answer: Answer) -> bool:
        """Whether anything came back."""
        assert self._transport is not None, "not connected"
        self._over = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._reader, self._has_begun = EventReader(answer), False
        self._is_whole = self.may_be_kept = False
        self._transport.write(content)
        await self._over
        answer.ended = time.monotonic()
        if self._has_begun:
            self._reader.finish(self._parser.get_status_code(), is_whole=self._is_whole)
        return self._has_begun

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast("asyncio.WriteTransport", transport), True

    def connection_lost(self, failure: Exception | None) -> None:
        self.is_open = self.may_be_kept = False
        self._end()

    def data_received(self, chunk: bytes) -> None:
        if self._parser is None:
            return
        self._has_begun = True
        try:
            self._parser.feed_data(chunk)
        except httptools.HttpParserError as error:
            self._reader.complain(f"not HTTP: {error}")
            self._end()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._reader.feed(body, time.monotonic())

    def on_message_complete(self) -> None:
        """Called by the parser."""
        assert self._parser is not None, "an answer without a request"
        self._is_whole = True
        self.may_be_kept = self.is_open and self._parser.should_keep_alive()
        self._end()

    def _end(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class EventReader:
    """Reads the body of a streamed answer, however the network cuts it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self._kept = b""
        self._is_done = False
        self._failure = ""

    def feed(self, body: bytes, now: float) -> None:
        """A piece that came at `now` (CLOCK_MONOTONIC seconds)."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        self._kept += body[: _KEPT_BYTES - len(self._kept)]
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def complain(self, failure: str) -> None:
        """The answer cannot be read on."""
        self._failure = failure

    def finish(self, status: int, *, is_whole: bool) -> None:
        """The answer has ended: decides what it was. `is_whole`: by the server's will, not because
        its connection was lost."""
        answer = self._answer
        answer.output_tokens = answer.output_tokens or len(answer.chunks)
        if status != 200:
            answer.status, answer.said = str(status or CONNECTION), _words(self._kept)
        elif self._failure:
            answer.status, _, answer.said = self._failure.partition(": ")
        elif self._is_done:
            answer.status = OK
        elif is_whole:
            answer.status, answer.said = "cut off", "the stream ended without [DONE]"
        else:
            answer.status, answer.said = CONNECTION, "lost within the stream"

    def _event(self, text: bytes, now: float) -> None:
        if text == _DONE:
            self._is_done = True
            return
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError:
            self.complain(f"not JSON: {text[:80]!r}")
            return
        if usage := event.get("usage"):
            self._answer.input_tokens = usage.get("prompt_tokens", 0)
            self._answer.output_tokens = usage.get("completion_tokens", 0)
        if error := event.get("error"):
            self.complain(_complaint(error))
        elif any(map(_has_text, event.get("choices") or ())):
            self._answer.chunks.append(now)


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a chunk brought something that a user would see: text, reasoning, a call."""
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    said = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(name) for name in said)


def _complaint(error: Any) -> str:
    """An error inside a stream, as `status: message`."""
    if not isinstance(error, dict):
        return f"error: {error}"
    return f"{error.get('code') or error.get('type') or 'error'}: {error.get('message', '')}"


def _words(body: bytes) -> str:
    """What the server says in the body of a refusal."""
    try:
        error = orjson.loads(body)
        return str(error["error"]["message"])[:_SAID_CHARS]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:_SAID_CHARS]
