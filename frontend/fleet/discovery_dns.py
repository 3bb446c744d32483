"""Engines behind a DNS name (a headless Service): all of its addresses, asked for again and again.

gRPC resolves a name again only when a connection breaks, so an engine that joins would not be seen;
and a session goes to one address. It does not know engines.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

POLL_S = 3.0
_LOG = logging.getLogger("tidemill.frontend.fleet")
Resolve = Callable[[str, int], Awaitable[frozenset[str]]]


async def resolve(name: str, port: int) -> frozenset[str]:
    """Every A and AAAA record, as host:port. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return frozenset(
        f"[{place[0]}]:{port}" if family is socket.AF_INET6 else f"{place[0]}:{port}"
        for family, _, _, _, place in found
    )


class DnsDiscovery:
    """Polls a resolver, the system's by default, every `poll_s` seconds."""

    def __init__(
        self, name: str, port: int, *, poll_s: float = POLL_S, resolve: Resolve = resolve
    ) -> None:
        self._name, self._port = name, port
        self._poll_s = poll_s
        self._resolve = resolve
        self.last_error = ""

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """After every answer. A failing resolver changes nothing: what was there may still be, and
        sessions tell by themselves when it is not."""
        while True:
            try:
                async with asyncio.timeout(max(10.0, self._poll_s)):
                    addresses = await self._resolve(self._name, self._port)
            except (OSError, TimeoutError, UnicodeError) as failure:  # the last: no name at all
                error = f"cannot resolve {self._name}: {failure or 'no answer'}"
                if error != self.last_error:
                    _LOG.warning(error)
                self.last_error = error
            else:
                self.last_error = ""
                yield addresses
            await asyncio.sleep(self._poll_s)
