"""One writer, several readers: messages of any size through a ring of anonymous shared memory.

The memory has no name, so it is gone with the last process that holds it, however that one ends.
Every reader acknowledges how far it has read; what not all have read is not overwritten. It does
not know what the messages say.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

RING_BYTES = 1 << 20
"""Room for a hundred steps. A longer message goes through in pieces."""

_WORDS = 8
"""Words of 8 bytes per process: a cache line, so that nobody's writes slow another one's reads."""
_HEAD, _ENDED, _WRITER_BEAT, _REASON_LEN, _AWAY_UNTIL = range(5)
_TAIL, _READER_BEAT = range(2)
_PAGE = mmap.PAGESIZE
_HEADER = struct.Struct("<QQ")  # sequence number, bytes of the message
_SPIN_S = 20e-6
"""On 2 cores, one reader told every 0.1 ms has its message after 72 us so, after 123 us without;
five times as long, three readers kept each other off the cores for milliseconds."""
_LOOK_S = 0.05
"""How often who waits for room asks whether anybody is still there to make some."""


class Ended(Exception):
    """The writer has said its last word; the text is its reason, empty when all is well."""


class SequenceGap(Exception):
    """A message is missing or came twice: the ranks would compute different things from here."""


class Wires(NamedTuple):
    """File descriptors of one reader, to be passed to its process: memory, news, room."""

    memory: int
    news: int
    room: int


class _Shared:
    """The memory as both sides see it: words of the writer and of every reader, a reason, the ring.

    Each word has one writer. Aligned words are read and written whole, and a lock that is taken
    and given back between payload and word keeps their order where the processor would not.
    """

    def __init__(self, fd: int, num_readers: int) -> None:
        self._map = mmap.mmap(fd, 0)
        self._bytes = memoryview(self._map)
        start = 2 * _PAGE
        self.words = self._bytes[:_PAGE].cast("Q")
        self.reason = self._bytes[_PAGE:start]
        self.ring = self._bytes[start:]
        self.size = len(self.ring)
        self.num_readers = num_readers
        self._order = threading.Lock()

    @staticmethod
    def bytes_for(ring: int) -> int:
        return 2 * _PAGE + -(-ring // _PAGE) * _PAGE

    def fence(self) -> None:
        with self._order:
            pass

    def line(self, reader: int) -> int:
        """Where the words of a reader begin."""
        return _WORDS * (reader + 1)

    def close(self) -> None:
        for view in (self.words, self.reason, self.ring, self._bytes):
            view.release()
        self._map.close()


class Writer:
    """send, beat, away, end. `check` is called while it waits for room, and raises to give up."""

    def __init__(
        self,
        num_readers: int,
        *,
        check: Callable[[], None] = lambda: None,
        ring_bytes: int = RING_BYTES,
        only: int | None = None,
    ) -> None:
        """`only`: of the readers, the one that is there; the others are on other hosts."""
        assert _WORDS * (num_readers + 1) * 8 <= _PAGE, f"{num_readers} readers are too many"
        self._memory = os.memfd_create("tidemill-plans")
        os.ftruncate(self._memory, _Shared.bytes_for(ring_bytes))
        readers = range(num_readers) if only is None else (only,)
        self._news = {one: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for one in readers}
        self._room = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._shared = _Shared(self._memory, num_readers)
        self._tails = [self._shared.line(reader) + _TAIL for reader in readers]
        self._check = check
        self._head = 0
        self._seq = 0

    def wires(self, reader: int) -> Wires:
        """What the process of a reader inherits; ours until `close`."""
        return Wires(self._memory, self._news[reader], self._room)

    def send(self, message: bytes) -> None:
        """Returns when all of it is in the ring: at once, unless a reader is far behind."""
        self._put(_HEADER.pack(self._seq, len(message)) + message)
        self._seq += 1

    def beat(self) -> None:
        """Shows the readers that this process lives."""
        self._shared.words[_WRITER_BEAT] = time.monotonic_ns()

    @contextlib.contextmanager
    def away(self, most_s: float) -> Iterator[None]:
        """Whoever holds the interpreter for long cannot beat: it tells readers before, and for how
        long at most."""
        words = self._shared.words
        words[_AWAY_UNTIL] = time.monotonic_ns() + int(most_s * 1e9)
        try:
            yield
        finally:
            self.beat()
            words[_AWAY_UNTIL] = 0

    def reader_beat(self, reader: int) -> int:
        """The last sign of life of a reader, monotonic nanoseconds; 0: none yet."""
        return self._shared.words[self._shared.line(reader) + _READER_BEAT]

    def end(self, reason: str = "") -> None:
        """Readers raise Ended when they have read everything; the first reason counts."""
        shared = self._shared
        if shared.words[_ENDED]:
            return
        text = reason.encode()[:_PAGE]
        shared.reason[: len(text)] = text
        shared.words[_REASON_LEN] = len(text)
        shared.fence()
        shared.words[_ENDED] = 1
        self._wake()

    def close(self) -> None:
        """Gives back memory and descriptors; readers keep theirs."""
        self._shared.close()
        for fd in (self._memory, self._room, *self._news.values()):
            os.close(fd)

    def _put(self, rest: bytes) -> None:
        shared = self._shared
        size, left = shared.size, memoryview(rest)
        while left:
            room = size - (self._head - min([shared.words[tail] for tail in self._tails]))
            if not room:
                self._await_room()
                continue
            count, at = min(room, len(left)), self._head % size
            first = min(count, size - at)
            shared.ring[at : at + first] = left[:first]
            shared.ring[: count - first] = left[first:count]
            left = left[count:]
            self._head += count
            shared.fence()
            shared.words[_HEAD] = self._head
            self._wake()

    def _wake(self) -> None:
        """Every time: a reader that sleeps cannot be told from one that is about to without a
        stronger order of memory than words have, and the call costs 1 us."""
        for news in self._news.values():
            os.eventfd_write(news, 1)

    def _await_room(self) -> None:
        self._check()
        _wait(self._room, _LOOK_S)


class Reader:
    """receive, beat: one of the other processes."""

    def __init__(
        self, wires: Wires, *, reader: int, num_readers: int, spin_s: float = _SPIN_S
    ) -> None:
        """Owns the descriptors from now on."""
        self._shared = _Shared(wires.memory, num_readers)
        self._wires = wires
        self._line = self._shared.line(reader)
        self._tail = self._shared.words[self._line + _TAIL]
        self._seq = 0
        self._spin_s = spin_s

    @property
    def num_received(self) -> int:
        return self._seq

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; raises TimeoutError when none begins within `timeout_s` (None: waits
        for ever), Ended when there will be none, and SequenceGap."""
        self._await(timeout_s)
        seq, length = _HEADER.unpack(b"".join(self._pieces(_HEADER.size)))
        if seq != self._seq:
            raise SequenceGap(f"message {seq} came where {self._seq} was due")
        message = b"".join(self._pieces(length))
        self._seq += 1
        return message

    def beat(self) -> None:
        """Shows the writer that this process lives."""
        self._shared.words[self._line + _READER_BEAT] = time.monotonic_ns()

    def writer_beat(self) -> int:
        """The last sign of life of the writer, monotonic nanoseconds; 0: none yet."""
        return self._shared.words[_WRITER_BEAT]

    def writer_is_away(self) -> bool:
        """Its silence means nothing now."""
        return self._shared.words[_AWAY_UNTIL] > time.monotonic_ns()

    def close(self) -> None:
        self._shared.close()
        for fd in self._wires:
            os.close(fd)

    def _pieces(self, count: int) -> Iterator[bytes]:
        """The next `count` bytes, as they come; every piece is acknowledged."""
        shared, size = self._shared, self._shared.size
        while count:
            here = shared.words[_HEAD] - self._tail
            if not here:
                self._await(None)
                continue
            shared.fence()
            at = self._tail % size
            take = min(count, here, size - at)
            yield bytes(shared.ring[at : at + take])
            count -= take
            self._tail += take
            shared.fence()
            shared.words[self._line + _TAIL] = self._tail
            if not count or here == take:
                with contextlib.suppress(BlockingIOError):  # full of news already
                    os.eventfd_write(self._wires.room, 1)

    def _await(self, timeout_s: float | None) -> None:
        """Returns when there is something to read. What comes within the spin is read without the
        tens of microseconds that being woken takes."""
        words, tail, clock = self._shared.words, self._tail, time.monotonic
        began = clock()
        while words[_HEAD] == tail:
            if clock() - began > self._spin_s:
                break
        while words[_HEAD] == tail:
            if words[_ENDED]:
                self._shared.fence()
                if words[_HEAD] != tail:
                    return
                raise Ended(
                    bytes(self._shared.reason[: words[_REASON_LEN]]).decode(errors="replace")
                )
            left = None if timeout_s is None else timeout_s - (clock() - began)
            if left is not None and left <= 0:
                raise TimeoutError(f"no message within {timeout_s:g} s")
            _wait(self._wires.news, left)


def _wait(event: int, timeout_s: float | None) -> None:
    """Until the eventfd is written, which is then taken back; sooner is no harm."""
    poll = select.poll()
    poll.register(event, select.POLLIN)
    if poll.poll(None if timeout_s is None else timeout_s * 1e3):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(event)
