"""Links between hosts: who gets in, and that nothing but what was said comes out."""

from __future__ import annotations

import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from engine_service.ranks.link import (
    _HEAD,
    _MAC,
    _PIECE,
    Link,
    LinkLost,
    NotOneOfUs,
    answer,
    knock,
)
from tests.waiting import eventually

SECRET = b"a secret of at least so many bytes"
WAIT_S = 60.0
BUFFER = 1 << 16
"""Far less than a piece, on machines whose sockets take megabytes by themselves."""


def ends() -> tuple[socket.socket, socket.socket]:
    """Of one TCP connection, in which little is on its way."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        far = socket.create_connection(door.getsockname(), WAIT_S)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        return far, door.accept()[0]


def both(far: Callable[[], Any], near: Callable[[], Any]) -> tuple[Any, Any]:
    """What both sides get, or raise, side by side."""
    found: dict[str, Any] = {}

    def run(name: str, what: Callable[[], Any]) -> None:
        try:
            found[name] = what()
        except (NotOneOfUs, LinkLost) as failure:
            found[name] = failure

    threads = [threading.Thread(target=run, args=pair) for pair in (("far", far), ("near", near))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return found["far"], found["near"]


@contextmanager
def linked() -> Iterator[tuple[Link, Link]]:
    a, b = ends()
    far, near = both(lambda: knock(a, SECRET), lambda: answer(b, SECRET))
    try:
        yield far, near
    finally:
        far.close()
        near.close()


def close(*socks: socket.socket) -> None:
    for sock in socks:
        sock.close()


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_any_size_come_whole_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [0, 1, _PIECE - 1, _PIECE, _PIECE + 1, 3 * _PIECE, *rng.choices(range(5000), k=40)]
    rng.shuffle(sizes)
    sent = [(rng.randrange(100), rng.randbytes(size)) for size in sizes]
    with linked() as (far, near):
        for ours, theirs in ((far, near), (near, far)):
            sender = threading.Thread(target=lambda one=ours: [one.send(*m) for m in sent])
            sender.start()
            assert [theirs.receive() for _ in sent] == sent
            sender.join(WAIT_S)


def fill(sock: socket.socket) -> None:
    """Until there is no room, also not when what was on its way has come."""
    sock.setblocking(False)
    while select.select([], [sock], [], 0.2)[1]:
        with suppress(BlockingIOError):
            while True:
                sock.send(bytes(_PIECE))
    sock.setblocking(True)


def test_an_offer_never_waits() -> None:
    """Neither for another thread's message nor for a reader that stands still."""
    large = bytes(64 << 20)
    with linked() as (far, near):
        assert far.offer(1, b"first")
        assert near.receive() == (1, b"first")
        sender = threading.Thread(target=lambda: far.send(2, large))
        sender.start()
        eventually(far._sending.locked, "a message on its way")
        assert not far.offer(1, b"too old by then")
        assert not far.offer(1, b"in between")
        assert sender.is_alive()
        assert near.receive() == (1, b"in between")
        assert near.receive() == (2, large)
        sender.join(WAIT_S)
        assert far.offer(1, b"last")
        assert near.receive() == (1, b"last")
        fill(far._sock)
        assert not far.offer(1, b"no room")
        far.shut()
        with pytest.raises(LinkLost):
            far.offer(1, b"nobody")


@pytest.mark.parametrize("seed", range(3))
def test_offers_come_all_through_a_message_that_takes_long(seed: int) -> None:
    """Pages of KV over a slow network, and signs of life meanwhile: whatever is read of a message,
    none is older than the pieces that lie in the sockets."""
    rng = random.Random(seed)
    large, later = rng.randbytes(40 * _PIECE + 7), rng.randbytes(2 * _PIECE)
    with linked() as (far, near):
        sender = threading.Thread(target=lambda: (far.send(2, large), far.send(3, later)))
        sender.start()
        eventually(far._sending.locked, "a message on its way")
        heard, count = [], 0
        while True:
            far.offer(1, str(count).encode())
            count += 1
            kind, payload = near.receive()
            if kind != 1:
                break
            heard.append(int(payload))
        assert (kind, payload) == (2, large)
        assert len(heard) > 2
        assert heard == sorted(set(heard))
        while (message := near.receive())[0] == 1:
            heard.append(int(message[1]))
        assert message == (3, later)
        assert heard == sorted(set(heard))
        sender.join(WAIT_S)


def test_a_wrong_secret_is_found_by_who_knocks_and_proves_nothing() -> None:
    a, b = ends()
    far, near = both(
        lambda: _knock_and_leave(a),
        lambda: answer(b, SECRET),
    )
    assert str(far) == "it has another secret"
    assert "it left when it was to prove itself" in str(near)
    close(a, b)


def _knock_and_leave(sock: socket.socket) -> Link:
    try:
        return knock(sock, b"another secret")
    finally:
        sock.close()


def test_who_only_pretends_to_know_the_secret_is_not_let_in() -> None:
    a, b = ends()

    def pretend() -> None:
        a.sendall(b"tidemil1" + os.urandom(32))
        a.recv(64)
        a.sendall(os.urandom(32))

    _, near = both(pretend, lambda: answer(b, SECRET))
    assert isinstance(near, NotOneOfUs)
    assert str(near) == "it has another secret"
    close(a, b)


def test_a_stranger_is_told_from_a_rank_by_its_first_words() -> None:
    a, b = ends()
    a.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + bytes(64))
    with pytest.raises(NotOneOfUs, match="does not speak as a rank"):
        answer(b, SECRET)
    close(a, b)


def recorded(far: Link, *messages: bytes) -> list[bytes]:
    """The frames of messages, as they would go over the network."""
    ours, theirs = socket.socketpair()
    real, far._sock = far._sock, ours
    frames = []
    for message in messages:
        far.send(1, message)
        frames.append(theirs.recv(1 << 16))
    far._sock = real
    close(ours, theirs)
    return frames


def change(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda one, two: [one, two], ""),  # the control
        (lambda one, two: [change(one, 0), two], "has not made"),
        (lambda one, two: [change(one, 5), two], "has not made"),
        (lambda one, two: [change(one, _HEAD.size), two], "has not made"),
        (lambda one, two: [change(one, _HEAD.size + _MAC), two], "has not made"),
        (lambda one, two: [one, one], "frame 0 came where 1 was due"),
        (lambda one, two: [two, one], "frame 1 came where 0 was due"),
        (lambda one, two: [_HEAD.pack(1, 1 << 31, 0) + bytes(_MAC)], "2147483648 bytes"),
    ],
)
def test_what_was_changed_repeated_or_left_out_is_found(
    spoil: Callable[[bytes, bytes], list[bytes]], told: str
) -> None:
    with linked() as (far, near):
        frames = spoil(*recorded(far, b"one plan", b"the next"))
        far._sock.sendall(b"".join(frames))
        if not told:
            assert [near.receive() for _ in frames] == [(1, b"one plan"), (1, b"the next")]
            return
        with pytest.raises(LinkLost, match=told):
            [near.receive() for _ in frames]


def test_a_frame_of_another_connection_says_nothing_here() -> None:
    with linked() as (far, _), linked() as (other, near):
        other._sock.sendall(recorded(far, b"a plan")[0])
        with pytest.raises(LinkLost, match="has not made"):
            near.receive()


def test_a_frame_is_not_taken_back_by_who_made_it() -> None:
    with linked() as (far, near):
        near._sock.sendall(recorded(far, b"a plan")[0])
        with pytest.raises(LinkLost, match="has not made"):
            far.receive()


def test_a_link_goes_on_in_the_process_that_takes_it_over() -> None:
    with linked() as (far, near):
        far.send(1, b"before")
        assert near.receive() == (1, b"before")
        near.send(2, b"there")
        heir = Link.take_over(os.dup(near.fileno()), near.hand_over())
        far.send(1, b"behind")
        assert heir.receive() == (1, b"behind")
        heir.send(2, b"and back")
        assert [far.receive() for _ in range(2)] == [(2, b"there"), (2, b"and back")]
        heir.close()


def test_an_end_is_told_to_who_receives_and_to_who_sends() -> None:
    with linked() as (far, near):
        threading.Timer(0.2, far.shut).start()
        with pytest.raises(LinkLost, match="has closed it"):
            near.receive()
        with pytest.raises(LinkLost):  # noqa: PT012
            for _ in range(100):
                near.send(1, bytes(1 << 16))
