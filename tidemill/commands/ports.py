"""Checks and picks the ports of a server before anything slow starts."""

import errno
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from tidemill.runtime.errors import FailedPrecondition


def settle(host: str, wanted: Mapping[str, int]) -> dict[str, int]:
    """The ports by flag, 0 replaced by a free one; raises FailedPrecondition naming the flag.

    All are held until the last is found, so that no two flags get the same port.
    """
    with ExitStack() as held:
        return {flag: _bind(held, host, flag, port) for flag, port in wanted.items()}


def reachable(host: str) -> str:
    """The address under which this machine itself reaches a server listening on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _bind(held: ExitStack, host: str, flag: str, port: int) -> int:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        probe = held.enter_context(socket.socket(family, kind))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)  # a port that is bound only can be bound again
    except (OSError, OverflowError) as failure:
        number = getattr(failure, "errno", None)
        busy = number == errno.EADDRINUSE
        why = "the port is in use" if busy else os.strerror(number or 0) if number else str(failure)
        raise FailedPrecondition(
            f"cannot listen on {host}:{port}: {why}; stop the other process or choose another "
            f"with {flag} (0 takes a free port)",
            reason="PORT_IN_USE" if busy else None,
            param=flag,
        ) from failure
    bound: int = probe.getsockname()[1]
    return bound
