"""Rank 0's door: where ranks of other hosts knock, prove themselves and say who they are.

Open only until all have come. It does not know what becomes of them.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from engine_service.ranks.frames import Frame
from engine_service.ranks.likeness import difference
from engine_service.ranks.link import Link, LinkLost, NotOneOfUs, answer
from tidemill.runtime.errors import EngineDead, FailedPrecondition, Unavailable

PATIENCE_S = 1800.0
"""Hosts may have an image to fetch first."""
_KNOCKING_S = 10.0
_AGAIN_S = 0.5
_AT_ONCE = 16
"""Strangers whose proof is waited for."""
_LOG = logging.getLogger("tidemill.rank")

Report = Callable[[str, int, int], None]


class Arrival(NamedTuple):
    """A rank that has proved itself, and is like rank 0."""

    rank: int
    link: Link
    host: str
    local_rank: int
    local_size: int


class Gathering:
    """`wait_for` ranks, `close`. `port` is the bound one."""

    def __init__(self, host: str, port: int, secret: bytes, own: dict[str, Any]) -> None:
        """`own`: likeness of this host. Raises FailedPrecondition where the port is taken."""
        self._secret, self._own = secret, own
        self._sock = listen(host, port)
        self.port: int = self._sock.getsockname()[1]
        self._place = f"{host}:{self.port}"
        self._is_closed = False
        self._knocking = threading.BoundedSemaphore(_AT_ONCE)
        self._news: queue.SimpleQueue[Arrival | str | None] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def wait_for(
        self, ranks: Collection[int], num_ranks: int, report: Report, patience_s: float = PATIENCE_S
    ) -> dict[int, Arrival]:
        """All of these, of a group of `num_ranks`. Raises FailedPrecondition as soon as one differs
        and Unavailable when some have not come in time. Closes the door."""
        here: dict[int, Arrival] = {}
        deadline = time.monotonic() + patience_s
        try:
            while missing := sorted(set(ranks) - here.keys()):
                names = ", ".join(map(str, missing[:8]))
                report(f"waiting at {self._place} for rank {names}", len(here), len(ranks))
                arrival = self._next(deadline, names)
                if arrival.rank not in ranks:
                    _refuse(arrival, f"rank {arrival.rank} is not one that is waited for: {names}")
                    continue
                if (former := here.pop(arrival.rank, None)) is not None:
                    _refuse(former, _has_come_anew(arrival))
                here[arrival.rank] = arrival
        except BaseException:
            for arrival in here.values():
                arrival.link.close()
            raise
        finally:
            self.close()
        for arrival in here.values():
            told = {"likeness": self._own, "num_ranks": num_ranks}
            try:
                arrival.link.send(Frame.WELCOME, json.dumps(told).encode())
            except LinkLost as failure:
                for one in here.values():  # nobody else waits for a group that there will not be
                    one.link.close()
                raise EngineDead(
                    f"rank {arrival.rank} on {arrival.host} came and has gone: {failure}"
                ) from failure
        return here

    def give_up(self, why: str) -> None:
        """Whoever waits raises it as FailedPrecondition, from any thread."""
        self._news.put(why)

    def close(self) -> None:
        """Nobody else comes in."""
        self._is_closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed before
        self._sock.close()

    def _next(self, deadline: float, names: str) -> Arrival:
        try:
            found = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise Unavailable(
                f"rank {names} has not come to {self._place} in time: start the other hosts with "
                "the same --leader-address and --group-token-file",
                reason="RANKS_MISSING",
            ) from None
        if found is None:
            raise Unavailable(f"the door at {self._place} has been closed")
        if isinstance(found, str):
            raise FailedPrecondition(found, reason="RANKS_DIFFER")
        return found

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._sock.accept()
            except OSError as failure:
                if self._is_closed:
                    self._news.put(None)
                    return
                # A connection that broke on its way, or no more descriptors: the next may come in.
                _LOG.warning("somebody cannot come in at %s: %s", self._place, failure.strerror)
                time.sleep(_AGAIN_S)
                continue
            if not self._knocking.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._meet, args=(sock, address[0]), daemon=True).start()

    def _meet(self, sock: socket.socket, address: str) -> None:
        late = threading.Timer(_KNOCKING_S, _cut, [sock])
        late.daemon = True
        late.start()
        try:
            link = answer(sock, self._secret)
            kind, told = link.receive()
            if kind != Frame.FACTS:
                raise NotOneOfUs(f"it began with a frame of kind {kind}")
        except (NotOneOfUs, LinkLost) as failure:
            _LOG.warning("somebody at %s is no rank of this group: %s", address, failure)
            sock.close()
            return
        finally:
            late.cancel()
            self._knocking.release()
        self._hear(link, told, address)

    def _hear(self, link: Link, told: bytes, address: str) -> None:
        arrival = Arrival(-1, link, address, 0, 0)
        try:
            facts = json.loads(told)
            host = f"{facts['host']} ({address})"
            rank, *beside = (int(facts[name]) for name in ("rank", "local_rank", "local_size"))
            wrong = difference(self._own, facts["likeness"], f"on rank {rank}, {host}")
            arrival = Arrival(rank, link, host, *beside)
        except KeyError as missing:  # it holds the secret, so it is no stranger
            wrong = _of_another_version(address, f"does not say its {missing.args[0]}")
        except (ValueError, TypeError, AttributeError, RecursionError) as failure:
            wrong = _of_another_version(address, f"says what cannot be read ({failure})")
        if wrong is None:
            self._news.put(arrival)
        else:
            _refuse(arrival, wrong)
            self._news.put(wrong)


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has been closed meanwhile
        sock.shutdown(socket.SHUT_RDWR)


def _of_another_version(address: str, why: str) -> str:
    return (
        f"a rank at {address} {why}: its version is another one; all hosts of a group need the same"
    )


def _has_come_anew(arrival: Arrival) -> str:
    return (
        f"rank {arrival.rank} has come again, from {arrival.host}: it was started anew, or two "
        "hosts have the same place; give each a --node-rank of its own"
    )


def _refuse(arrival: Arrival, why: str) -> None:
    try:
        arrival.link.send(Frame.REFUSED, why.encode())
    except LinkLost:
        _LOG.warning("rank %d on %s is gone already", arrival.rank, arrival.host)
    arrival.link.close()


def listen(host: str, port: int) -> socket.socket:
    """On that address alone, or on all where the name is not (yet) one of this host's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    wanted = [(family, address) for family, *_, address in found]
    for family, address in [*wanted, (socket.AF_INET, ("", port))]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(128)
        except OSError as failure:
            sock.close()
            last = failure
            if failure.errno == errno.EADDRINUSE:
                break  # who asks for the name may come to the other program there
            continue
        _warn_of_place(host, str(address[0]))
        return sock
    raise FailedPrecondition(
        f"cannot wait for other hosts at {host}:{port}: {last.strerror}; another engine may do so "
        "there, pass another port with --leader-address HOST:PORT on all hosts",
        reason="PORT_TAKEN",
        param="leader_address",
    )


def _warn_of_place(host: str, address: str) -> None:
    if not address:
        _LOG.warning("%s is no address of this host: listening on all it has", host)
    elif host not in (address, "localhost") and ipaddress.ip_address(address).is_loopback:
        _LOG.warning(
            "%s is %s on this host, where no other host comes in: pass --leader-address with an "
            "address that they reach, or correct /etc/hosts",
            host,
            address,
        )
