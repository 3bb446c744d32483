"""The HTTP server, and how it stops listening without losing anybody who has connected.

Closing a listening socket resets the connections that wait to be accepted, and those whose
handshake is on its way. Their clients have connected: unlike somebody who was refused, they cannot
know that nobody has seen their request. So at first no new handshake is answered, then everybody
who is through is accepted, and only then the socket is closed. It does not know requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from tidemill.runtime.errors import FailedPrecondition

_LOG = logging.getLogger("tidemill.frontend.http")
_BACKLOG = 2048
_HANDSHAKE_S = 0.25
"""Round trips of handshakes that have begun."""
_MOMENT_S = 2.0
"""How long somebody who has connected may take to ask."""
_LOOK_S = 0.02
_SO_ATTACH_FILTER = 26
"""Linux; Python does not name it."""
_NO_SYN = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the flags out of the TCP header
        (0x54, 0, 0, 0x12),  # keep SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone, which opens a connection?
        (0x06, 0, 0, 0),  # drop the packet
        (0x06, 0, 0, 0xFFFFFFFF),  # or let it pass
    )
)
"""Classic BPF (Linux, Documentation/networking/filter.rst)."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; FailedPrecondition when the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as failure:
        listener.close()
        raise FailedPrecondition(
            f"cannot listen on {host}:{port}: {failure.strerror}; stop the other process or choose "
            "another port with --http-port (0 takes a free one)",
            reason="PORT_IN_USE",
            param="--http-port",
        ) from failure
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the frontend has its own drain."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self.servers = []
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to FrontendServer.run."""
        yield

    async def run_until_told(self) -> None:
        """Serves whoever connects to the listener, until `should_exit`."""
        await self.serve(sockets=[self._listener])

    async def refuse(self) -> None:
        """Connections are refused from the moment this returns, and some time before. Everybody who
        got one has asked by then, or has had a moment to; no connection takes a second request."""
        drop_handshakes(self._listener)
        await asyncio.sleep(_HANDSHAKE_S)
        await _while(lambda: _somebody_waits(self._listener), _MOMENT_S)
        for server in self.servers:
            server.close()
        await _while(self._somebody_may_ask, _MOMENT_S)
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def finish(self, most_s: float) -> None:
        """Returns when all that was asked has been answered, or after `most_s`."""
        await _while(lambda: bool(self.server_state.tasks), most_s)

    def _somebody_may_ask(self) -> bool:
        """TLS handshakes are not among the connections, so with TLS there may always be one."""
        connections: set[Any] = set(self.server_state.connections)
        return self.config.is_ssl or any(
            one.cycle is None or one.cycle.response_complete for one in connections
        )


def drop_handshakes(listener: socket.socket) -> None:
    """New handshakes stay without an answer, so their clients try again a second later, when the
    socket is closed and refuses them; those that have begun go on. Where a kernel has no such
    filter, a connection is lost that comes within the microseconds of closing."""
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
    count = len(_NO_SYN) // struct.calcsize("HBBI")
    try:
        listener.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", count, ctypes.addressof(program)),
        )
    except OSError as failure:
        _LOG.debug("no filter for new connections: %s", failure)


async def _while(condition: Callable[[], bool], most_s: float) -> None:
    """Returns when it is false, or after `most_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            while condition():  # noqa: ASYNC110 (the kernel and uvicorn have no event for it)
                await asyncio.sleep(_LOOK_S)


def _somebody_waits(listener: socket.socket) -> bool:
    """Whether connections wait to be accepted."""
    if listener.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))
