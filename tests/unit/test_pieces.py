"""Bytes of pages that get from one process to another: the right ones, or an error."""

from __future__ import annotations

import fcntl
import gc
import os
import zlib
from contextlib import suppress
from dataclasses import replace

import pytest

from engine_service import pieces as pieces_module
from engine_service.core.handoff import (
    MAX_ON_THE_WAY,
    InlinePiece,
    SharedPiece,
    most_on_the_way,
)
from engine_service.pieces import Files, Views, check_size, inlined, laid
from tidemill.runtime.errors import FailedPrecondition, Unavailable


def offered(files: Files, transfer: int, content: bytes) -> SharedPiece:
    def fill(place: memoryview) -> None:
        place[:] = content

    return files.offer(transfer, len(content), fill)


def read(views: Views, piece: SharedPiece) -> bytes:
    with views.opened(piece) as place:
        return bytes(place)


def test_pieces_bring_what_was_offered() -> None:
    files, views = Files(), Views()
    contents = [bytes([n] * (20_000 - 999 * n)) for n in range(1, MAX_ON_THE_WAY + 2)]
    pieces = [offered(files, 7, one) for one in contents]
    for content, piece in list(zip(contents, pieces, strict=True))[1:]:
        assert read(views, piece) == content
        assert inlined(views, piece) == InlinePiece(content, zlib.crc32(content))
    short = replace(pieces[1], size=30_000)
    with pytest.raises(FailedPrecondition, match=r"it ends after \d+ bytes") as caught:
        read(views, short)
    assert caught.value.reason == "KV_SHARED"
    with pytest.raises(Unavailable, match=r"rank 0 has gone.* it ends after \d+ bytes") as gone:
        inlined(views, short)
    assert gone.value.reason == "KV_OWN"
    with pytest.raises(FailedPrecondition, match="cannot read shared KV") as caught:
        read(views, SharedPiece(1, 0, 1000, 0))
    assert caught.value.reason == "KV_SHARED"
    files.end(7)
    files.end(7)
    with pytest.raises(FailedPrecondition, match="3 bytes of KV came for pages of 4"):
        check_size(offered(files, 7, b"abc"), 4)


def test_a_piece_that_is_read_too_late_is_told() -> None:
    """Ahead of the bytes, or behind them where others came while they were read."""
    files, views = Files(), Views()
    first, *_ = pieces = [offered(files, 7, bytes([n] * 100)) for n in range(MAX_ON_THE_WAY)]
    with views.opened(first) as place:
        assert bytes(place) == bytes(100)
    with pytest.raises(FailedPrecondition, match="read too late") as caught, views.opened(first):
        later = offered(files, 7, b"other")
    assert caught.value.reason == "KV_PIECE"
    assert later.fd == first.fd
    with pytest.raises(FailedPrecondition, match="read too late"), views.opened(first):
        raise AssertionError("other bytes lie there")
    with pytest.raises(Unavailable, match="read too late"):
        inlined(views, first)
    assert read(views, later) == b"other"
    assert read(views, pieces[1]) == bytes([1] * 100)


def test_a_piece_that_is_being_written_is_not_read() -> None:
    files, views = Files(), Views()
    piece = offered(files, 1, b"before")
    files.end(1)

    def fill(place: memoryview) -> None:
        with pytest.raises(FailedPrecondition, match="read too late"):
            read(views, piece)
        place[:] = b"behind"

    assert read(views, files.offer(1, 6, fill)) == b"behind"


def test_bytes_that_changed_on_their_way_are_refused() -> None:
    files, views = Files(), Views()
    content = bytes(range(200))
    sent = InlinePiece(content, zlib.crc32(content))
    assert read(views, laid(files, 1, sent)) == content
    with pytest.raises(FailedPrecondition, match="changed on their way") as caught:
        laid(files, 1, replace(sent, content=content[::-1]))
    assert caught.value.reason == "KV_PIECE"


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK])
def test_a_file_whose_size_may_change_is_not_mapped(seals: int) -> None:
    """Reading behind its end would end the process that reads."""
    number = os.memfd_create("tidemill-kv", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(number, 200)
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(FailedPrecondition, match="its size may change") as caught:
            read(Views(), SharedPiece(os.getpid(), number, 100, 0))
        assert caught.value.reason == "KV_SHARED"
        piece = offered(files := Files(), 1, b"abc")
        with pytest.raises(PermissionError):
            os.ftruncate(piece.fd, 10)
        assert read(Views(), piece) == b"abc"
        del files
    finally:
        os.close(number)


def test_another_file_under_the_same_number_is_mapped_anew() -> None:
    """As of another process that has got the number of one that is gone."""
    files, views = Files(), Views()
    piece = offered(files, 1, b"first")
    assert read(views, piece) == b"first"
    others = Files()
    other = offered(others, 1, b"other")
    kept = os.dup(piece.fd)
    try:
        os.dup2(other.fd, piece.fd)
        assert read(views, replace(other, fd=piece.fd)) == b"other"
        with pytest.raises(FailedPrecondition, match="read too late"):
            read(views, piece)
    finally:
        os.dup2(kept, piece.fd)
        os.close(kept)
    assert read(views, piece) == b"first"


def test_few_files_stay_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that were read last; one of any size."""
    monkeypatch.setattr(pieces_module, "_MAPPED_FILES", 3)
    monkeypatch.setattr(pieces_module, "_MAPPED_BYTES", 10_000)
    pinned: list[int] = []
    files, views = Files(), Views(lambda memory: pinned.append(len(memory)))
    pieces = [offered(files, 1, bytes([n] * (100 + n))) for n in range(5)]
    for piece in pieces:
        assert read(views, piece)[0] == pieces.index(piece)
    assert [fd for _, fd in views._mapped] == [piece.fd for piece in pieces[2:]]
    assert len(pinned) == 5
    read(views, pieces[2])
    assert len(pinned) == 5, "one that is mapped is mapped again"
    large = offered(files, 1, bytes(20_000))
    assert read(views, large) == bytes(20_000)
    assert [fd for _, fd in views._mapped] == [large.fd]
    assert read(views, pieces[0]) == bytes(100)


def shared_files() -> set[str]:
    """Descriptors of such files; those of other tests may close meanwhile."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            if "tidemill-kv" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(number)
    return found


def test_shared_files_are_used_again_and_few_are_kept() -> None:
    gc.collect()
    before = shared_files()
    shared = Files()
    for transfer in range(3):
        for size in [3000] * MAX_ON_THE_WAY + [2000]:
            offered(shared, transfer, bytes(size))
    assert len(shared._used) == 3
    for transfer in range(3):
        shared.end(transfer)
    assert not shared._used
    kept = {file.number for file in shared._idle}
    assert len(kept) == MAX_ON_THE_WAY
    # Python's mapping of a file has a descriptor of its own.
    assert len(shared_files() - before) == 2 * MAX_ON_THE_WAY
    again = [offered(shared, 4, bytes(2500)).fd for _ in kept]
    assert set(again) == kept
    larger = offered(shared, 5, bytes(3001))
    assert read(Views(), larger) == bytes(3001)
    shared.end(4)
    shared.end(5)
    del shared
    assert shared_files() == before
    with pytest.raises(FailedPrecondition, match="cannot read shared KV"):
        read(Views(), larger)


@pytest.mark.parametrize(
    ("piece_bytes", "most"), [(1, MAX_ON_THE_WAY), (2 << 20, 8), (5 << 20, 3), (1 << 30, 2)]
)
def test_large_pieces_hold_few_files(piece_bytes: int, most: int) -> None:
    """A window of host memory a transfer, and as much when nobody transfers anything."""
    assert most_on_the_way(piece_bytes) == most
    if piece_bytes > 8 << 20:
        return
    files = Files()
    for transfer in range(2):
        for _ in range(most + 2):
            files.offer(transfer, piece_bytes, lambda place: None)
        assert len(files._used[transfer]) == most
    assert len(files._idle) <= most
    for transfer in range(2):
        files.end(transfer)
    assert len(files._idle) == most
