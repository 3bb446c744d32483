"""How large one message to an engine may be. It does not know what the messages say."""

from __future__ import annotations

from frontend.outbox import Sized
from tidemill.runtime.errors import InvalidRequest

FROM_ENGINES_BYTES = 64 << 20
"""What an engine may send in one message, whatever clients may: it cuts steps at 4 MiB, but never
what one row says of one token."""
_FRAME_BYTES = 64
"""Around a request in its message, at most."""


class TooLargeForEngine(InvalidRequest):
    """This engine's limit is smaller than the frontend's; another one's may not be."""


class MessageLimit:
    """The smaller one of the frontend's own limit and the engine's. For one message that is larger,
    gRPC ends its whole stream: a session, with all requests in it."""

    def __init__(self, own: int) -> None:
        self._own = own
        self.heard(0)

    def heard(self, engines: int) -> None:
        """The engine has told its limit; 0: it does not say."""
        self._most, self._whose, self._refusal = self._own, "frontend", InvalidRequest
        if 0 < engines < self._own:
            self._most, self._whose, self._refusal = engines, "engine", TooLargeForEngine

    def check(self, request: Sized) -> int:
        """Its bytes. Raises InvalidRequest for a request that no message holds."""
        size = request.ByteSize() + _FRAME_BYTES
        if size > self._most:
            raise self._refusal(
                f"the request is {size} bytes on its way to the engine, and a message there has at "
                f"most {self._most} (--max-message-bytes of the {self._whose}); send a shorter "
                "prompt, schema or grammar, or fewer listed tokens"
            )
        return size
