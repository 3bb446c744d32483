"""A response as server-sent events, in OpenAI's order. It does not know who keeps responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from frontend.api.responses_object import Draft
from frontend.api.sse import named_event
from frontend.generation import Generation
from tidemill.runtime.errors import ServiceError


class ResponseStream:
    """The events of one response: give `events(...)` and `end` to an EventStream."""

    def __init__(self, draft: Draft, keep: Callable[[], None]) -> None:
        """`keep` is called once the draft is settled, before the client hears of it."""
        self._draft = draft
        self._keep = keep
        self._num_sent = 0
        self._unsent = b""
        """Events that wait for the next delta: whatever ends the stream ahead of it takes them
        along, for they have their numbers."""

    def queued(self) -> bytes:
        """What comes first of a response in the background, before anything is computed."""
        return self._response("created") + self._response("queued")

    async def events(self, entering: Generation) -> AsyncGenerator[bytes, None]:
        """The response without its output, item after item, and all of it once more, whole."""
        draft = self._draft
        async with entering as generation:
            if not self._num_sent:
                self._unsent = self._response("created")
            draft.status = "in_progress"
            self._unsent += self._response("in_progress")
            async for news in generation.deltas():
                for delta in news:
                    self._unsent += draft.feed(delta, generation.usage, self._event)
                if self._unsent and not draft.is_settled:
                    yield self._taken()
        self._keep()
        yield self._last(draft.status)

    def end(self, failure: ServiceError | None) -> bytes:
        """A failure in the middle ends in response.failed; behind a whole one nothing follows."""
        if failure is None:
            return b""
        self._draft.fail(failure)
        self._keep()
        return self._last("failed")

    def stopped(self) -> bytes:
        """The last event of one that its client has cancelled, or deleted."""
        return self._last(self._draft.status)

    def _last(self, status: str) -> bytes:
        return self._taken() + self._response(status)

    def _taken(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        return unsent

    def _response(self, what: str) -> bytes:
        return self._event(f"response.{what}", response=self._draft.to_json())

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **content})
