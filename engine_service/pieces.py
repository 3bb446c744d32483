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

from engine_service.core.handoff import MAX_ON_THE_WAY, InlinePiece, Piece, SharedPiece
from tidemill.runtime.errors import FailedPrecondition

_NAME = "tidemill-kv"
Fill = Callable[[memoryview], object]


class _File:
    """One without a name in memory (memfd), of a fixed size."""

    def __init__(self, size: int) -> None:
        self.number = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self.number, size)
        self.memory = mmap.mmap(self.number, size)

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
        self._idle: deque[_File] = deque(maxlen=MAX_ON_THE_WAY)

    def offer(
        self, transfer: int, size: int, fill: Fill, told_crc32: int | None = None
    ) -> SharedPiece:
        """A piece of `size` bytes, which `fill` is given a place to write to. The one offered
        MAX_ON_THE_WAY before it in the transfer is freed. `told_crc32`: by whoever sent the bytes.
        """
        used = self._used[transfer]
        if len(used) >= MAX_ON_THE_WAY:
            self._idle.append(used.popleft())
        file = self._take(size)
        used.append(file)
        with memoryview(file.memory) as whole, whole[:size] as place:
            fill(place)
            known = crc32(place) if told_crc32 is None else told_crc32
            return SharedPiece(os.getpid(), file.number, size, known)

    def end(self, transfer: int) -> None:
        """Frees what was offered in it. Idempotent."""
        self._idle.extend(self._used.pop(transfer, ()))

    def _take(self, size: int) -> _File:
        """The idle file that was used last and is large enough, or a new one."""
        for file in reversed(self._idle):
            if len(file.memory) >= size:
                self._idle.remove(file)
                return file
        return _File(max(size, 1))


def fetch(piece: Piece, into: memoryview) -> None:
    """Copies a piece's bytes; raises FailedPrecondition (KV_PIECE, KV_SHARED) for other ones."""
    if isinstance(piece, SharedPiece):
        _check_size(piece.size, into)
        with _opened(piece) as file:
            _check_end(os.preadv(file, [into], 0), piece)
    else:
        _check_size(len(piece.content), into)
        into[:] = piece.content
    found = crc32(into)
    if found != piece.crc32:
        raise FailedPrecondition(
            f"the CRC-32 of {len(into)} bytes of KV is {found:08x}, their sender says "
            f"{piece.crc32:08x}: they were changed on their way",
            reason="KV_PIECE",
        )


def inlined(piece: SharedPiece) -> InlinePiece:
    """The same for another host. Whoever gets it finds out whether it was read too late. Raises
    FailedPrecondition (KV_SHARED)."""
    with _opened(piece) as file:
        content = os.pread(file, piece.size, 0)
        _check_end(len(content), piece)
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


def _check_size(size: int, into: memoryview) -> None:
    if size != len(into):
        raise FailedPrecondition(
            f"{size} bytes of KV came for pages of {len(into)} bytes", reason="KV_PIECE"
        )
