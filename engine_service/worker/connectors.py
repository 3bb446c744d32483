"""How the bytes of pages get from one engine to another, beside or inside of gRPC messages.

A connector makes pieces of bytes; `fetch` reads those of any connector. It does not know pages.
CRC-32 finds every error of up to 32 bits in a row, and is cheap enough to stand between two steps.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections import deque

from engine_service.core.handoff import MAX_ON_THE_WAY, InlinePiece, Piece, SharedPiece
from tidemill.runtime.errors import FailedPrecondition

_NAME = "tidemill-kv"


class Connector(ABC):
    """One way to offer bytes to another engine."""

    @abstractmethod
    def offer(self, transfer: int, content: memoryview) -> Piece:
        """A piece with these bytes, which may change once this has returned."""

    @abstractmethod
    def end(self, transfer: int) -> None:
        """Frees what was offered in it."""


class Inline(Connector):
    """The piece is the bytes, and travels in gRPC messages: between any two hosts."""

    def offer(self, transfer: int, content: memoryview) -> Piece:
        """One copy."""
        copied = bytes(content)
        return InlinePiece(copied, zlib.crc32(copied))

    def end(self, transfer: int) -> None:
        """It keeps nothing."""


class Shared(Connector):
    """The piece names a file without a name in memory (memfd) that a process of the same user and
    process namespace reads. The kernel frees it with its last descriptor, whoever dies and how."""

    def __init__(self) -> None:
        self._files: dict[int, deque[int]] = {}

    def offer(self, transfer: int, content: memoryview) -> Piece:
        """One copy. The piece offered MAX_ON_THE_WAY before it in the transfer is freed."""
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        kept = self._files.setdefault(transfer, deque())
        kept.append(file)
        if len(kept) > MAX_ON_THE_WAY:
            os.close(kept.popleft())
        done = 0
        while done < len(content):
            done += os.write(file, content[done:])
        return SharedPiece(os.getpid(), file, len(content), zlib.crc32(content))

    def end(self, transfer: int) -> None:
        """Idempotent."""
        for file in self._files.pop(transfer, ()):
            os.close(file)


def fetch(piece: Piece, into: memoryview) -> None:
    """Copies a piece's bytes; raises FailedPrecondition (KV_PIECE, KV_SHARED) for other ones."""
    if isinstance(piece, SharedPiece):
        _read_shared(piece, into)
    else:
        _check_size(len(piece.content), into)
        into[:] = piece.content
    found = zlib.crc32(into)
    if found != piece.crc32:
        raise FailedPrecondition(
            f"the CRC-32 of {len(into)} bytes of KV is {found:08x}, their sender says "
            f"{piece.crc32:08x}: they were changed on their way",
            reason="KV_PIECE",
        )


def _read_shared(piece: SharedPiece, into: memoryview) -> None:
    _check_size(piece.size, into)
    path = f"/proc/{piece.pid}/fd/{piece.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise OSError("it is not a prefill engine's file")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(into):
                count = os.preadv(file, [into[done:]], done)
                if not count:
                    raise OSError(f"it ends after {done} of {len(into)} bytes")
                done += count
        finally:
            os.close(file)
    except OSError as failure:
        raise FailedPrecondition(
            f"cannot read shared KV at {path}: {failure}; engines that share memory run on one "
            "host as one user, others need --kv-connector grpc",
            reason="KV_SHARED",
        ) from failure


def _check_size(size: int, into: memoryview) -> None:
    if size != len(into):
        raise FailedPrecondition(
            f"{size} bytes of KV came for pages of {len(into)} bytes", reason="KV_PIECE"
        )
