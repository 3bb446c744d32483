"""Rank 0's door: who comes twice, who cannot come in, and where it is."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
from typing import Any

import pytest

from engine_service.config import EngineConfig
from engine_service.ranks import gathering
from engine_service.ranks.frames import Frame
from engine_service.ranks.gathering import Arrival, Gathering, listen
from engine_service.ranks.likeness import likeness
from engine_service.ranks.link import Link, knock
from tidemill.runtime.errors import FailedPrecondition

SECRET = b"a secret of at least so many bytes"
OWN = likeness(EngineConfig())
WAIT_S = 10.0


def come(door: Gathering, rank: int, host: str) -> Link:
    link = knock(socket.create_connection(("127.0.0.1", door.port), WAIT_S), SECRET)
    facts = {"rank": rank, "local_rank": 0, "local_size": 1, "host": host, "likeness": OWN}
    link.send(Frame.FACTS, json.dumps(facts).encode())
    return link


class Waiting:
    """For ranks, in a thread."""

    def __init__(self, door: Gathering, *ranks: int) -> None:
        self._door, self._ranks = door, ranks
        self.found: dict[int, Arrival] = {}
        self._here = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.await_next()

    def await_next(self) -> None:
        """Until it waits anew: somebody has come in."""
        assert self._here.acquire(timeout=WAIT_S)

    def end(self) -> dict[int, Arrival]:
        self._thread.join(WAIT_S)
        return self.found

    def _run(self) -> None:
        def report(*_: Any) -> None:
            self._here.release()

        self.found = self._door.wait_for(self._ranks, 3, report, WAIT_S)


def test_who_comes_a_second_time_takes_the_place_and_the_first_is_told_why() -> None:
    door = Gathering("127.0.0.1", 0, SECRET, OWN)
    waiting = Waiting(door, 1, 2)
    first = come(door, 1, "b")
    waiting.await_next()
    second = come(door, 1, "c")
    kind, why = first.receive()
    assert kind == Frame.REFUSED
    assert b"rank 1 has come again, from c (127.0.0.1)" in why
    assert b"--node-rank of its own" in why
    last = come(door, 2, "d")
    assert [one.receive()[0] for one in (second, last)] == [Frame.WELCOME, Frame.WELCOME]
    found = waiting.end()
    assert found[1].host == "c (127.0.0.1)"
    for link in (first, second, last, found[1].link, found[2].link):
        link.close()


@pytest.mark.parametrize("missing", ["host", "local_size", "likeness"])
def test_a_rank_of_a_version_that_says_less_is_told_and_ends_the_wait(missing: str) -> None:
    door = Gathering("127.0.0.1", 0, SECRET, OWN)
    link = knock(socket.create_connection(("127.0.0.1", door.port), WAIT_S), SECRET)
    facts: dict[str, Any] = {
        "rank": 1, "local_rank": 0, "local_size": 1, "host": "b", "likeness": OWN,
    }  # fmt: skip
    del facts[missing]
    link.send(Frame.FACTS, json.dumps(facts).encode())
    with pytest.raises(FailedPrecondition, match=f"does not say its {missing}: .* version") as told:
        door.wait_for([1], 2, lambda *_: None, WAIT_S)
    assert told.value.reason == "RANKS_DIFFER"
    assert link.receive() == (Frame.REFUSED, told.value.message.encode())
    link.close()


FACTS = {"rank": 1, "local_rank": 0, "local_size": 1, "host": "b", "likeness": OWN}


@pytest.mark.parametrize(
    "told",
    [
        b"no JSON",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        json.dumps(FACTS | {"rank": [1]}).encode(),
        json.dumps(FACTS | {"likeness": None}).encode(),
        json.dumps(FACTS | {"likeness": OWN | {"versions": []}}).encode(),
    ],
)
def test_a_rank_whose_words_cannot_be_read_is_told_and_ends_the_wait(told: bytes) -> None:
    """Its thread died over them: it waited unanswered, and rank 0 for it, half an hour."""
    door = Gathering("127.0.0.1", 0, SECRET, OWN)
    link = knock(socket.create_connection(("127.0.0.1", door.port), WAIT_S), SECRET)
    link.send(Frame.FACTS, told)
    with pytest.raises(FailedPrecondition, match=r"says what cannot be read .* version") as ended:
        door.wait_for([1], 2, lambda *_: None, 3.0)
    assert ended.value.reason == "RANKS_DIFFER"
    assert link.receive() == (Frame.REFUSED, ended.value.message.encode())
    link.close()


class Narrow:
    """A listening socket that takes nobody in once: the process has no descriptor left."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.num_refused = 0

    def accept(self) -> Any:
        if not self.num_refused:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_who_could_not_come_in_does_not_close_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_AGAIN_S", 0.01)
    door = Gathering("127.0.0.1", 0, SECRET, OWN)
    door._sock = narrow = Narrow(door._sock)  # type: ignore[assignment]
    waiting = Waiting(door, 1, 2)
    links = [come(door, rank, "b") for rank in (1, 2)]
    assert [link.receive()[0] for link in links] == [Frame.WELCOME, Frame.WELCOME]
    assert narrow.num_refused == 1
    for link in (*links, *(one.link for one in waiting.end().values())):
        link.close()


def addresses(*hosts: str) -> Any:
    """A name that leads to these."""
    return lambda _, port, **how: [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts
    ]


def test_a_name_whose_first_address_is_taken_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts would come to whoever has it."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", addresses("127.0.0.1", "127.0.0.2"))
        with pytest.raises(FailedPrecondition, match=f"wait for other hosts at gpu-0:{port}"):
            listen("gpu-0", port)
        monkeypatch.setattr(socket, "getaddrinfo", addresses("192.0.2.1", "127.0.0.2"))
        listen("gpu-0", port).close()  # what is no address of this host is passed over


def test_a_name_that_other_hosts_cannot_come_to_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian's installer writes such names of hosts into /etc/hosts."""
    caplog.set_level(logging.WARNING)
    for host in ("127.0.0.1", "localhost"):
        listen(host, 0).close()
    assert not caplog.text
    monkeypatch.setattr(socket, "getaddrinfo", addresses("127.0.1.1"))
    listen("gpu-0", 0).close()
    assert "gpu-0 is 127.0.1.1 on this host, where no other host comes in" in caplog.text
