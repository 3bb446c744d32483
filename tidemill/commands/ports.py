"""Checks and picks the ports of servers before anything slow starts."""

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from tidemill.runtime.errors import FailedPrecondition

_LAST = (1 << 16) - 1


class Wish(NamedTuple):
    """A port to listen on, 0 for a free one, and the flag that asks for it. `who` says for which of
    several servers."""

    host: str
    flag: str
    port: int
    who: str = ""


def settle(wishes: Sequence[Wish]) -> list[int]:
    """The port of every wish, 0 replaced by a free one; raises FailedPrecondition naming the flag.

    All are held until the last is found, so that no two get the same; those that are named come
    first, so that no free one is in their way.
    """
    found: dict[int, int] = {}
    with ExitStack() as held:
        for index in sorted(range(len(wishes)), key=lambda index: wishes[index].port == 0):
            owners = {found[other]: wishes[other] for other in found}
            found[index] = _bind(held, wishes[index], owners.get(wishes[index].port))
    return [found[index] for index in range(len(wishes))]


def reachable(host: str) -> str:
    """The address under which this machine itself reaches a server listening on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _bind(held: ExitStack, wish: Wish, rival: Wish | None) -> int:
    host, flag, port, who = wish
    if not 0 <= port <= _LAST:
        raise FailedPrecondition(
            f"cannot listen on port {port}{who and f' for {who}'}: ports end at {_LAST}; choose "
            f"another with {flag} (0 takes a free port)",
            param=flag,
        )
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        probe = held.enter_context(socket.socket(family, kind))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)  # a port that is bound only can be bound again
    except OSError as failure:
        busy = failure.errno == errno.EADDRINUSE
        why = "the port is in use" if busy else failure.strerror or str(failure)
        other = "stop the other process"
        if busy and rival is not None:
            other = f"it is {_told(rival)}'s"
        raise FailedPrecondition(
            f"cannot listen on {host}:{port}{who and f' for {who}'}: {why}; {other} or choose "
            f"another with {flag} (0 takes a free port)",
            reason="PORT_IN_USE" if busy else None,
            param=flag,
        ) from failure
    bound: int = probe.getsockname()[1]
    return bound


def _told(wish: Wish) -> str:
    return wish.flag + (wish.who and f" of {wish.who}")
