"""Server-sent events: framing, delivery, and the end of a stream that fails.

It does not know what the events mean.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.api.envelopes import openai_error
from frontend.api.http import CUT, SEND_PIECE, unless_gone
from tidemill.runtime.errors import Cancelled, InternalError, ServiceError

_LOG = logging.getLogger("tidemill.frontend.http")
DONE = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    """One event with a JSON body."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def named_event(name: str, content: Mapping[str, Any]) -> bytes:
    """One event with a name and a JSON body."""
    return b"event: " + name.encode() + b"\n" + event(content)


def openai_end(error: ServiceError | None) -> bytes:
    """How streams of completions end: [DONE], behind the error if there was one."""
    return DONE if error is None else event(openai_error(error)) + DONE


class Frames:
    """Chunks of one stream: the fields that never change are rendered once."""

    def __init__(self, **constant: Any) -> None:
        self._head = b"data: " + orjson.dumps(constant)[:-1] + b","

    def chunk(self, **changing: Any) -> bytes:
        """One chunk as an event."""
        return self._head + orjson.dumps(changing)[1:] + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields; the generator ends when the client leaves.

    Nothing is sent before the first item, so that a request that is refused gets its own status.
    `end` says what comes last, behind everything or behind a failure in the middle.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[ServiceError | None], bytes] = openai_end,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._end = end
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                send_piece = scope.get("state", {}).get(SEND_PIECE, send)
                failure = await unless_gone(receive, self._deliver(send, send_piece))
                if failure is not None:
                    scope.setdefault("state", {})[CUT] = failure.reason.lower()
            except Cancelled:
                if not self._has_begun:
                    raise  # counted as a request that got no answer
                scope.setdefault("state", {})[CUT] = "cancelled"

    async def _deliver(self, send: Send, send_piece: Send) -> ServiceError | None:
        """What ended the stream where it had begun."""
        first = await anext(self._events, b"")
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        failure: ServiceError | None = None
        try:
            async for item in self._events:
                await send_piece({"type": "http.response.body", "body": item, "more_body": True})
        except ServiceError as error:
            failure = error
        except Exception as bug:  # the status is out: the client learns it from an event
            _LOG.exception("a stream failed")
            failure = InternalError(f"{type(bug).__name__}: {bug}")
        await send({"type": "http.response.body", "body": self._end(failure), "more_body": False})
        return failure
