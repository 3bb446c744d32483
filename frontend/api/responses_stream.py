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

    def queued(self) -> bytes:
        """What comes first of a response in the background, before anything is computed."""
        return self._response("created") + self._response("queued")

    async def events(self, entering: Generation) -> AsyncGenerator[bytes, None]:
        """The response without its output, item after item, and all of it once more, whole."""
        draft = self._draft
        async with entering as generation:
            unsent = b"" if self._num_sent else self._response("created")
            draft.status = "in_progress"
            unsent += self._response("in_progress")
            async for news in generation.deltas():
                for delta in news:
                    unsent += draft.feed(delta, generation.usage, self._event)
                if unsent and not draft.is_settled:
                    yield unsent
                    unsent = b""
        self._keep()
        yield unsent + self._response(draft.status)

    def end(self, failure: ServiceError | None) -> bytes:
        """A failure in the middle ends in response.failed; behind a whole one nothing follows."""
        if failure is None:
            return b""
        self._draft.fail(failure)
        self._keep()
        return self._response("failed")

    def stopped(self) -> bytes:
        """The last event of one that its client has cancelled, or deleted."""
        return self._response(self._draft.status)

    def _response(self, what: str) -> bytes:
        return self._event(f"response.{what}", response=self._draft.to_json())

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **content})
