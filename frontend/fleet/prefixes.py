"""Follows the KV events of every engine, for the index of prefixes.

An engine that does not tell, or tells what cannot be, is loaded like the others; its prefixes just
count for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import grpc

from frontend.engine_events import Batch, subscribe
from frontend.fleet.prefix_index import PrefixIndex, Stored
from tidemill.runtime.errors import ServiceError, Unsupported

_LOG = logging.getLogger("tidemill.frontend.fleet")
_PAUSE_S = 1.0


class Prefixes:
    """One subscription per engine with an open session. One that comes back goes on where it was,
    if it is still the same process."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, tuple[str, int]] = {}
        """(instance, number of the last batch) by address."""

    def hits(self, packed: bytes, salt: str) -> Mapping[str, int]:
        """Leading tokens of the prompt that engines have KV of."""
        return self._index.hits(packed, salt)

    def follow(self, address: str, instance_id: str, channel: grpc.aio.Channel) -> None:
        """The engine's session is open."""
        self.pause(address)
        if self._seen.get(address, ("", 0))[0] != instance_id:
            self.forget(address)
            self._seen[address] = (instance_id, 0)
        self._tasks[address] = asyncio.create_task(
            self._read(address, channel), name=f"kv events {address}"
        )

    def pause(self, address: str) -> None:
        """The engine's session is lost."""
        task = self._tasks.pop(address, None)
        if task is not None:
            task.cancel()

    def forget(self, address: str) -> None:
        """The engine is gone, or it is another one."""
        self.pause(address)
        self._index.forget(address)
        self._seen.pop(address, None)

    async def close(self) -> None:
        """Ends all subscriptions."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, address: str, channel: grpc.aio.Channel) -> None:
        while True:
            instance_id, seq = self._seen[address]
            try:
                async for batch in subscribe(channel, seq + 1 if seq else 0):
                    self._apply(address, batch)
                    # Half a snapshot is no place to go on from.
                    seen = 0 if batch.is_snapshot else batch.seq
                    self._seen[address] = (instance_id, seen)
            except Unsupported as refused:
                _LOG.warning("no KV events: %s", refused.message, extra={"engine": address})
                return
            except ServiceError as failure:
                _LOG.debug("KV events broke off: %s", failure.message, extra={"engine": address})
            except ValueError as wrong:
                # What else it told may be as wrong, and would be told again.
                self._index.forget(address)
                _LOG.warning("KV events are wrong: %s", wrong, extra={"engine": address})
                return
            await asyncio.sleep(_PAUSE_S)

    def _apply(self, address: str, batch: Batch) -> None:
        if batch.is_fresh:
            self._index.forget(address)
        for event in batch.events:
            if isinstance(event, Stored):
                self._index.store(address, event)
            elif event is None:
                self._index.forget(address)
            else:
                self._index.remove(address, event)
