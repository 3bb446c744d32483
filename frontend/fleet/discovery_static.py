"""Engines that are named on the command line and never change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable


class StaticDiscovery:
    """A fixed list of addresses."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self.addresses = frozenset(addresses)
        self.last_error = ""

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """Once."""
        yield self.addresses
