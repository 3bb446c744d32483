"""Bytes of pages in files without a name (memfd), by which they get from one process of a host to
another: between an engine's server and its rank 0, and between engines of one host.

They are read where they lie: each file is mapped once by who reads it. It does not know pages.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import secrets
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from isal.isal_zlib import crc32

from engine_service.core.handoff import InlinePiece, SharedPiece, most_on_the_way
from tidemill.runtime.errors import FailedPrecondition, Unavailable

_NAME = "tidemill-kv"
_HEAD_BYTES = 64
"""Ahead of the bytes: the stamp of what they are."""
_MAPPED_BYTES, _MAPPED_FILES = 256 << 20, 128
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_STAMP = struct.Struct("Q")
_WRITING = 0

Fill = Callable[[memoryview], object]
Pin = Callable[[mmap.mmap], object]
"""Makes memory such that a device reads and writes it by itself, for as long as what is returned is
referred to."""


def no_pin(memory: mmap.mmap) -> None:
    """Where no device reads it."""


class _File:
    """One in memory, of a fixed size; `number` is its descriptor."""

    def __init__(self, size: int, pin: Pin) -> None:
        self.number = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # A place without memory behind it would end the process that writes to it, or reads it.
        os.posix_fallocate(self.number, 0, _HEAD_BYTES + size)
        fcntl.fcntl(self.number, fcntl.F_ADD_SEALS, _SEALS)
        self.memory = mmap.mmap(self.number, _HEAD_BYTES + size)
        self.size = size
        self._pinned = pin(self.memory)

    def __del__(self) -> None:
        os.close(self.number)


class Files:
    """Pieces that processes of the same user and process namespace read. The kernel frees them with
    their last descriptors and mappings, whoever dies and how.

    Files are used again: memory that is new takes several times as long, for the kernel clears it
    page by page. Who reads one too late finds another stamp on it.
    """

    def __init__(self, pin: Pin = no_pin) -> None:
        self._pin = pin
        self._used: dict[int, deque[_File]] = defaultdict(deque)
        self._idle: deque[_File] = deque()
        # Another process may have had this one's number, and this file's.
        self._stamps = itertools.count(1 + secrets.randbits(62))

    def offer(self, transfer: int, size: int, fill: Fill) -> SharedPiece:
        """A piece of `size` bytes, which `fill` is given a place to write to. The one offered
        `most_on_the_way` before it in the transfer is freed."""
        used = self._used[transfer]
        if len(used) >= most_on_the_way(size):
            self._keep(used.popleft())
        file, stamp = self._take(size), next(self._stamps)
        used.append(file)
        _STAMP.pack_into(file.memory, 0, _WRITING)
        with memoryview(file.memory) as whole, whole[_HEAD_BYTES : _HEAD_BYTES + size] as place:
            fill(place)
        _STAMP.pack_into(file.memory, 0, stamp)
        return SharedPiece(os.getpid(), file.number, size, stamp)

    def end(self, transfer: int) -> None:
        """Frees what was offered in it. Idempotent."""
        for file in self._used.pop(transfer, ()):
            self._keep(file)

    def _keep(self, file: _File) -> None:
        """For the next pieces; as many as one transfer of such pieces takes."""
        self._idle.append(file)
        while len(self._idle) > most_on_the_way(file.size):
            self._idle.popleft()

    def _take(self, size: int) -> _File:
        """The idle file that was used last and is large enough, or a new one."""
        for file in reversed(self._idle):
            if file.size >= size:
                self._idle.remove(file)
                return file
        return _File(max(size, 1), self._pin)


class _Mapping(NamedTuple):
    """A file of another process. `inode` says which, as long as it is mapped."""

    inode: tuple[int, int]
    memory: mmap.mmap
    pinned: object


class Views:
    """Of pieces in files, the last ones of which stay mapped: 128 of up to 256 MiB in all, and one
    at least. A sender that is gone leaves no more than that behind."""

    def __init__(self, pin: Pin = no_pin) -> None:
        self._pin = pin
        self._mapped: OrderedDict[tuple[int, int], _Mapping] = OrderedDict()

    @contextmanager
    def opened(self, piece: SharedPiece) -> Iterator[memoryview]:
        """The piece's bytes, writable, which nobody should. Raises FailedPrecondition (KV_SHARED)
        where they are not to be had, and (KV_PIECE) where others lie there: at the end, too, for
        they may have been replaced meanwhile, and what was read means nothing then."""
        memory = self._map(piece).memory
        if len(memory) < _HEAD_BYTES + piece.size:
            raise _unreadable(piece, f"it ends after {len(memory) - _HEAD_BYTES} bytes")
        _check_stamp(memory, piece)
        with memoryview(memory) as whole, whole[_HEAD_BYTES : _HEAD_BYTES + piece.size] as place:
            yield place
        _check_stamp(memory, piece)

    def _map(self, piece: SharedPiece) -> _Mapping:
        key, path = (piece.pid, piece.fd), _path_of(piece)
        try:
            told = os.stat(path)
            inode = told.st_dev, told.st_ino
            mapping = self._mapped.pop(key, None)
            if mapping is None or mapping.inode != inode:
                mapping = self._open(path)
        except OSError as failure:
            raise _unreadable(piece, str(failure)) from failure
        self._mapped[key] = mapping
        while self._is_full() and len(self._mapped) > 1:
            self._mapped.popitem(last=False)
        return mapping

    def _open(self, path: str) -> _Mapping:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise OSError("it is not an engine's file")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Reading behind the end of one that gets shorter would end this process.
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise OSError("its size may change")
            told = os.fstat(file)
            memory = mmap.mmap(file, told.st_size)
        finally:
            os.close(file)
        return _Mapping((told.st_dev, told.st_ino), memory, self._pin(memory))

    def _is_full(self) -> bool:
        num_bytes = sum(len(one.memory) for one in self._mapped.values())
        return num_bytes > _MAPPED_BYTES or len(self._mapped) > _MAPPED_FILES


def _check_stamp(memory: mmap.mmap, piece: SharedPiece) -> None:
    (found,) = _STAMP.unpack_from(memory)
    if found != piece.stamp:
        raise FailedPrecondition(
            f"shared KV at {_path_of(piece)} was read too late: other bytes lie there",
            reason="KV_PIECE",
        )


def inlined(views: Views, piece: SharedPiece) -> InlinePiece:
    """A piece of this engine's own rank 0 for another host. Raises Unavailable."""
    try:
        with views.opened(piece) as place:
            content = bytes(place)
    except FailedPrecondition as failure:
        raise Unavailable(
            f"this engine's rank 0 has gone, or its pages cannot be read: {failure.message}",
            reason="KV_OWN",
        ) from failure
    return InlinePiece(content, crc32(content))


def laid(files: Files, transfer: int, piece: InlinePiece) -> SharedPiece:
    """Bytes that came in a message where rank 0 finds them: it would stand still while they go
    through a pipe, which is much smaller than they are. Raises FailedPrecondition (KV_PIECE) for
    other bytes than were sent; CRC-32 finds every error of up to 32 bits in a row."""
    content, found = piece.content, crc32(piece.content)
    if found != piece.crc32:
        raise FailedPrecondition(
            f"the CRC-32 of {len(content)} bytes of KV is {found:08x}, their sender says "
            f"{piece.crc32:08x}: they were changed on their way",
            reason="KV_PIECE",
        )

    def fill(place: memoryview) -> None:
        place[:] = content

    return files.offer(transfer, len(content), fill)


def check_size(piece: SharedPiece, num_bytes: int) -> None:
    """Raises FailedPrecondition (KV_PIECE) for a piece of another size."""
    if piece.size != num_bytes:
        raise FailedPrecondition(
            f"{piece.size} bytes of KV came for pages of {num_bytes} bytes", reason="KV_PIECE"
        )


def _path_of(piece: SharedPiece) -> str:
    return f"/proc/{piece.pid}/fd/{piece.fd}"


def _unreadable(piece: SharedPiece, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"cannot read shared KV at {_path_of(piece)}: {why}; engines that share memory run on one "
        "host as one user, others need --kv-connector grpc",
        reason="KV_SHARED",
    )
