"""Bytes of pages in files without a name (memfd), by which they get from one process of a host to
another: between an engine's server and its rank 0, and between engines of one host.

It does not know pages. CRC-32 finds every error of up to 32 bits in a row, and is cheap enough to
stand between two steps. So is a copy into memory that was used before; memory that is new takes
several times as long, for the kernel clears it page by page.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isal.isal_zlib import crc32

from engine_service.core.handoff import InlinePiece, SharedPiece, most_on_the_way
from tidemill.runtime.errors import FailedPrecondition, Unavailable

_NAME = "tidemill-kv"
Fill = Callable[[memoryview], object]


class _File:
    """One without a name in memory, of a fixed size; `number` is its descriptor."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        # A place without memory behind it would end the process when it is written to.
        os.posix_fallocate(number, 0, size)
        self.memory = mmap.mmap(number, size)

    def __del__(self) -> None:
        os.close(self.number)


class Files:
    """Pieces that processes of the same user and process namespace read. The kernel frees them with
    their last descriptors, whoever dies and how.

    Files are used again. Who reads one too late finds the bytes of another piece there, and that
    their CRC-32 is not the one that was told.
    """

    def __init__(self) -> None:
        self._used: dict[int, deque[_File]] = defaultdict(deque)
        self._idle: deque[_File] = deque()

    def offer(
        self, transfer: int, size: int, fill: Fill, told_crc32: int | None = None
    ) -> SharedPiece:
        """A piece of `size` bytes, which `fill` is given a place to write to. The one offered
        `most_on_the_way` before it in the transfer is freed. `told_crc32`: by whoever sent the
        bytes."""
        used = self._used[transfer]
        if len(used) >= most_on_the_way(size):
            self._keep(used.popleft())
        file = self._take(size)
        used.append(file)
        with memoryview(file.memory) as whole, whole[:size] as place:
            fill(place)
            known = crc32(place) if told_crc32 is None else told_crc32
            return SharedPiece(os.getpid(), file.number, size, known)

    def end(self, transfer: int) -> None:
        """Frees what was offered in it. Idempotent."""
        for file in self._used.pop(transfer, ()):
            self._keep(file)

    def _keep(self, file: _File) -> None:
        """For the next pieces; as many as one transfer of such pieces takes."""
        self._idle.append(file)
        while len(self._idle) > most_on_the_way(len(file.memory)):
            self._idle.popleft()

    def _take(self, size: int) -> _File:
        """The idle file that was used last and is large enough, or a new one."""
        for file in reversed(self._idle):
            if len(file.memory) >= size:
                self._idle.remove(file)
                return file
        return _File(os.memfd_create(_NAME, os.MFD_CLOEXEC), max(size, 1))


def fetch(piece: SharedPiece, into: memoryview) -> None:
    """Copies a piece's bytes; raises FailedPrecondition (KV_PIECE, KV_SHARED) for other ones."""
    check_size(piece, len(into))
    with _opened(piece) as file:
        done = 0
        while done < len(into) and (count := os.preadv(file, [into[done:]], done)):
            done += count
        _check_end(done, piece)
    found = crc32(into)
    if found != piece.crc32:
        raise FailedPrecondition(
            f"the CRC-32 of {len(into)} bytes of KV is {found:08x}, their sender says "
            f"{piece.crc32:08x}: they were changed on their way",
            reason="KV_PIECE",
        )


def inlined(piece: SharedPiece) -> InlinePiece:
    """A piece of this engine's own rank 0 for another host. Whoever gets it finds out whether it
    was read too late. Raises Unavailable."""
    try:
        with _opened(piece) as file:
            content = os.pread(file, piece.size, 0)
            _check_end(len(content), piece)
    except FailedPrecondition as failure:
        raise Unavailable(
            f"this engine's rank 0 has gone, or its pages cannot be read: {failure.message}",
            reason="KV_OWN",
        ) from failure
    return InlinePiece(content, piece.crc32)


@contextmanager
def _opened(piece: SharedPiece) -> Iterator[int]:
    path = f"/proc/{piece.pid}/fd/{piece.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise OSError("it is not an engine's file")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)
    except OSError as failure:
        raise FailedPrecondition(
            f"cannot read shared KV at {path}: {failure}; engines that share memory run on one "
            "host as one user, others need --kv-connector grpc",
            reason="KV_SHARED",
        ) from failure


def _check_end(count: int, piece: SharedPiece) -> None:
    if count != piece.size:
        raise OSError(f"it ends after {count} of {piece.size} bytes")


def check_size(piece: SharedPiece, num_bytes: int) -> None:
    """Raises FailedPrecondition (KV_PIECE) for a piece of another size."""
    if piece.size != num_bytes:
        raise FailedPrecondition(
            f"{piece.size} bytes of KV came for pages of {num_bytes} bytes", reason="KV_PIECE"
        )
