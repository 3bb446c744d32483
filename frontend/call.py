"""The mailbox of one request at the engine: the session's reader fills it, the request empties it.

It does not know the wire. Memory is bounded: what is not read merges into one delta per sequence,
of canvases only the newest is kept, and a mailbox that is too full ends its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from frontend.messages import Canvas, Delta, Finish, TokenLogprobs
from frontend.rounds import Reader
from tidemill.runtime.errors import Overloaded, ServiceError

MAX_UNREAD_BYTES = 1 << 20
_PATIENCE_BYTES = MAX_UNREAD_BYTES // 4
_BYTES_PER_TOKEN = 4
_BYTES_PER_ALTERNATIVE = 8


class Announcements(Protocol):
    """Who says when a mailbox may be read (frontend.rounds)."""

    def put(self, reader: Reader) -> None: ...

    def back(self, reader: Reader) -> None: ...


class Call:
    """One request of one or several sequences; `handles[i]` names sequence i on the session.

    Written by the engine client (add_*, finish, fail) and read by one task (`read`, `close`).
    """

    def __init__(
        self,
        handles: Sequence[int],
        *,
        release: Callable[[list[int], bool], None],
        stop: Callable[[int, int, str], None],
        rounds: Announcements,
    ) -> None:
        """`release(handles, abort)` forgets handles, `stop(handle, completion_tokens, string)`
        tells the engine where a text ended, `rounds` wakes the reader when it may look at its
        news."""
        self._handles = handles
        self._live = set(handles)
        self._release = release
        self._stop = stop
        self._rounds = rounds
        self._loop = asyncio.get_running_loop()
        self._unread: dict[int, Delta] = {}
        self._num_unread_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: ServiceError | None = None
        self._is_announced = self._may_read = False
        self._arrived: Callable[[int], None] | None = None
        self._heard_of: Callable[[], None] | None = None
        self.has_begun = False
        """Whether anything of any sequence has arrived."""

    def wait_for_all(self, arrived: Callable[[int], None]) -> None:
        """From now on the reader is woken for the last finish only, for an error, or when the
        mailbox fills up. `arrived(index)` is called when tokens of a sequence come."""
        self._arrived = arrived

    def when_heard_of(self, heard_of: Callable[[], None]) -> None:
        """`heard_of` is called once, with the first news or when none will come any more."""
        self._heard_of = heard_of

    async def read(self) -> list[Delta]:
        """Everything new, at least one delta; raises the request's error once all is read."""
        self._rounds.back(self)
        if not self._may_read:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._unread:
            deltas = list(self._unread.values())
            self._unread, self._num_unread_bytes = {}, 0
            self._is_announced, self._may_read = False, self._error is not None
            return deltas
        assert self._error is not None, "woken without news"
        raise self._error

    def stop(self, index: int, num_tokens: int, stop_string: str) -> None:
        """The text of sequence `index` ended after `num_tokens`; its Finish is still to come."""
        if self._handles[index] in self._live:
            self._stop(self._handles[index], num_tokens, stop_string)

    def close(self, *, abort: bool = True) -> None:
        """Nothing arrives afterwards; what still runs is aborted, unless the caller knows that
        the engine will end it by itself. Idempotent."""
        self._rounds.back(self)
        self._tell()
        live, self._live = sorted(self._live), set()
        if live:
            self._release(live, abort)

    def add_tokens(self, index: int, token_ids: Sequence[int]) -> None:
        """Committed tokens, behind those already there; a canvas that was not read is old news now.
        May end the request (SLOW_READER)."""
        if self._num_unread_bytes > MAX_UNREAD_BYTES:
            self.close()
            self.fail(
                Overloaded(
                    f"the client reads too slowly: more than {MAX_UNREAD_BYTES} bytes are waiting "
                    "for it; read faster, or ask for fewer logprobs",
                    reason="SLOW_READER",
                )
            )
            return
        self._num_unread_bytes += _BYTES_PER_TOKEN * len(token_ids)
        delta = self._delta(index)
        delta.token_ids.extend(token_ids)
        delta.canvas = None
        if self._arrived is not None:
            self._arrived(index)

    def add_logprobs(self, index: int, entries: list[TokenLogprobs]) -> None:
        """One entry per committed token."""
        self._count(entries)
        self._delta(index).logprobs.extend(entries)

    def add_prompt_logprobs(self, index: int, entries: list[TokenLogprobs]) -> None:
        """One entry per prompt position, in order, from position 1."""
        self._count(entries)
        self._delta(index).prompt_logprobs.extend(entries)

    def show_canvas(self, index: int, canvas: Canvas) -> None:
        """The newest tentative state; it replaces one that was not read."""
        self._delta(index).canvas = canvas

    def finish(self, index: int, finish: Finish) -> None:
        """The sequence's one terminal event."""
        self._live.discard(self._handles[index])
        self._delta(index).finish = finish
        if not self._live:
            self._announce()

    def fail(self, error: ServiceError) -> None:
        """Ends the whole request; what has arrived can still be read."""
        self._live.clear()
        self._tell()
        self._error = self._error or error
        self.wake()

    def wake(self) -> bool:
        """The reader may look at its news now; whether it waited for them. See `Rounds`."""
        self._may_read = True
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True

    def _tell(self) -> None:
        heard_of, self._heard_of = self._heard_of, None
        if heard_of is not None:
            heard_of()

    def _count(self, entries: list[TokenLogprobs]) -> None:
        self._num_unread_bytes += sum(_BYTES_PER_ALTERNATIVE * len(e.token_ids) for e in entries)

    def _delta(self, index: int) -> Delta:
        delta = self._unread.get(index)
        if delta is None:
            delta = self._unread[index] = Delta(index)
            self.has_begun = True
            if self._heard_of is not None:
                self._tell()
        if self._arrived is None or self._num_unread_bytes > _PATIENCE_BYTES:
            self._announce()
        return delta

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            self._rounds.put(self)
