"""Plans for other ranks through shared memory: whole, in order, once, and never overwritten."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from engine_service.ranks.broadcast import _HEADER, Ended, Reader, SequenceGap, Wires, Writer
from tests.waiting import eventually

RING = 4096
SIZES = (0, 1, 100, RING - 17, RING - 16, RING - 15, RING, RING + 1, 3 * RING, 10 * RING)


def copies(wires: Wires) -> Wires:
    """As another process would inherit them."""
    return Wires(*map(os.dup, wires))


@contextmanager
def ring(
    num_readers: int = 1, check: Callable[[], None] = lambda: None
) -> Iterator[tuple[Writer, list[Reader]]]:
    writer = Writer(num_readers, check=check, ring_bytes=RING)
    readers = [
        Reader(copies(writer.wires(i)), reader=i, num_readers=num_readers)
        for i in range(num_readers)
    ]
    yield writer, readers
    writer.close()
    for reader in readers:
        reader.close()


def read_all(reader: Reader, into: list[bytes], pause: Callable[[], float]) -> str:
    """Until the writer has ended; returns its reason."""
    while True:
        try:
            into.append(reader.receive(20.0))
        except Ended as last:
            return str(last)
        if (seconds := pause()) > 0:
            time.sleep(seconds)


@pytest.mark.parametrize("seed", range(4))
def test_every_reader_gets_every_message_whole_and_in_order(seed: int) -> None:
    """Up to ten times the ring, around its end at every offset, with readers of their own pace."""
    rng = random.Random(seed)
    sizes = [*SIZES, *(rng.randrange(2 * RING) for _ in range(150))]
    rng.shuffle(sizes)
    messages = [rng.randbytes(size) for size in sizes]
    with ring(3) as (writer, readers):
        got: list[list[bytes]] = [[], [], []]
        paces = (lambda: 0.0, lambda: rng.random() * 1e-3, lambda: rng.choice((0.0, 2e-3)))
        threads = [
            threading.Thread(target=read_all, args=three, daemon=True)
            for three in zip(readers, got, paces, strict=True)
        ]
        for thread in threads:
            thread.start()
        for message in messages:
            writer.send(message)
        writer.end()
        for thread in threads:
            thread.join(30.0)
    assert got == [messages] * 3


def test_a_slow_reader_holds_the_writer_and_loses_nothing() -> None:
    with ring(2) as (writer, (fast, slow)):
        sent: list[int] = []

        def write() -> None:
            for number in range(40):
                writer.send(bytes([number]) * 1000)
                sent.append(number)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        early = [fast.receive(5.0) for _ in range(4)]
        eventually(lambda: len(sent) == 4, "the fourth does not fit")
        time.sleep(0.2)
        assert len(sent) == 4  # the ring holds four, whatever the other reader has taken
        late = [slow.receive(5.0) for _ in range(4)]
        for _ in range(36):
            early.append(fast.receive(5.0))
            late.append(slow.receive(5.0))
        thread.join(10.0)
    assert early == late == [bytes([number]) * 1000 for number in range(40)]


def test_a_writer_does_not_wait_for_a_reader_that_is_known_to_be_dead() -> None:
    class Gone(Exception):
        pass

    dead = threading.Event()

    def check() -> None:
        if dead.is_set():
            raise Gone

    with ring(1, check) as (writer, _):
        began = time.monotonic()  # before the timer's own clock runs
        threading.Timer(0.2, dead.set).start()
        with pytest.raises(Gone):
            writer.send(bytes(3 * RING))
        assert 0.15 < time.monotonic() - began < 5.0


def test_a_reader_that_waits_long_is_woken() -> None:
    with ring(1) as (writer, (reader,)):
        threading.Timer(0.3, writer.send, [b"late"]).start()
        began = time.thread_time()
        assert reader.receive(10.0) == b"late"
        assert time.thread_time() - began < 0.05  # and it does not keep a core busy meanwhile


def test_silence_is_told() -> None:
    with ring(1) as (_, (reader,)), pytest.raises(TimeoutError, match=r"0\.05 s"):
        reader.receive(0.05)


def test_the_end_comes_behind_what_was_sent_and_the_first_reason_counts() -> None:
    with ring(2) as (writer, readers):
        writer.send(b"last plan")
        writer.end("rank 3 is lost")
        writer.end("something else")
        for reader in readers:
            assert reader.receive(5.0) == b"last plan"
            with pytest.raises(Ended, match=r"^rank 3 is lost$"):
                reader.receive(5.0)


@pytest.mark.parametrize("seq", [0, 2, 7])
def test_a_message_that_is_missing_or_comes_twice_is_found(seq: int) -> None:
    with ring(1) as (writer, (reader,)):
        writer.send(b"first")
        assert reader.receive(5.0) == b"first"
        writer._put(_HEADER.pack(seq, 4) + b"next")
        with pytest.raises(SequenceGap, match=f"{seq} came where 1 was due"):
            reader.receive(5.0)


def test_an_overwritten_ring_would_be_noticed() -> None:
    """The control: with a writer that does not ask how far readers are, messages are torn."""
    with ring(1) as (writer, (reader,)):
        real = writer._tails
        for number in range(6):
            writer._shared.words[real[0]] = writer._head  # as if all had been read
            writer.send(bytes([number]) * 1000)
        writer._shared.words[real[0]] = 0
        with pytest.raises(SequenceGap):
            [reader.receive(5.0) for _ in range(6)]


def test_signs_of_life_have_a_place_of_their_own() -> None:
    with ring(3) as (writer, readers):
        assert [writer.reader_beat(i) for i in range(3)] == [0, 0, 0]
        readers[1].beat()
        assert [writer.reader_beat(i) > 0 for i in range(3)] == [False, True, False]
        assert readers[0].writer_beat() == 0
        writer.beat()
        assert all(reader.writer_beat() > 0 for reader in readers)


def count_left() -> None:
    """The memory has no name; other processes of the machine may name theirs meanwhile."""

    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_now()
    for _ in range(5):
        with ring(3) as (writer, readers):
            assert open_now() > before
            wires = {fd for reader in range(3) for fd in writer.wires(reader)}
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in wires]
            assert sum(link.startswith("/memfd:") for link in links) == 1
            assert not any(link.startswith("/dev/shm/") for link in links)
            writer.send(b"one")
            assert [reader.receive(5.0) for reader in readers] == [b"one"] * 3
    assert open_now() == before


def test_nothing_is_left_of_it() -> None:
    """In a process where no threads of other tests open and close descriptors meanwhile."""
    process = multiprocessing.get_context("spawn").Process(target=count_left)
    process.start()
    process.join()
    assert process.exitcode == 0
