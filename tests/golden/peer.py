"""A peer of another release between two services: what it does not know does not get through.

Every call is passed on, message by message, each squeezed through the peer's own contract. To the
server behind it it is a client of that release, to the client before it a server of that release.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from tests.golden.contract import Contract, Method, squeezed
from tidemill.runtime.rpc import channel_options, server_options

LIMIT = 64 << 20
Heard = Callable[[str, bool, Any], None]


class Peer(grpc.GenericRpcHandler):
    """Counts the messages of each method that went through it."""

    def __init__(self, channel: grpc.aio.Channel, contract: Contract, heard: Heard | None) -> None:
        self._channel = channel
        self._contract = contract
        self._heard = heard
        self.counts: Counter[str] = Counter()

    def service(self, details: Any) -> Any:
        """On the wire a single message is a stream of one. What the contract lacks is not there."""
        method = self._contract.methods.get(details.method)
        if method is None:
            return None

        async def relay(requests: Any, context: Any) -> None:
            await self._relay(details.method, method, requests, context)

        return grpc.stream_stream_rpc_method_handler(relay)

    async def _relay(self, name: str, method: Method, requests: Any, context: Any) -> None:
        metadata = [pair for pair in context.invocation_metadata() if pair[0] != "user-agent"]
        left = context.time_remaining()
        call = self._channel.stream_stream(name)(metadata=metadata, timeout=left)
        pump = asyncio.create_task(self._pump(name, method, requests, call))
        try:
            await context.send_initial_metadata(await call.initial_metadata())
            async for content in call:
                await context.write(self._passed(name, method.answers, content, False))
            context.set_trailing_metadata(tuple(await call.trailing_metadata()))
        except grpc.aio.AioRpcError as failed:
            trailing = tuple(failed.trailing_metadata())
            await context.abort(failed.code(), failed.details(), trailing)
        finally:
            call.cancel()
            pump.cancel()
            with suppress(asyncio.CancelledError):
                await pump

    async def _pump(self, name: str, method: Method, requests: Any, call: Any) -> None:
        async for content in requests:
            await call.write(self._passed(name, method.asks, content, True))
        await call.done_writing()

    def _passed(self, name: str, kind: Any, content: bytes, is_request: bool) -> bytes:
        message = squeezed(kind, content)
        self.counts[name] += 1
        if self._heard is not None:
            self._heard(name, is_request, message)
        return bytes(message.SerializeToString())


@asynccontextmanager
async def peer(
    port: int, contract: Contract, heard: Heard | None = None
) -> AsyncIterator[tuple[int, Peer]]:
    """(its port, itself) in front of the service at `port`."""
    address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(address, channel_options(LIMIT)) as channel:
        between = Peer(channel, contract, heard)
        server = grpc.aio.server(handlers=[between], options=server_options(LIMIT))
        bound = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield bound, between
        finally:
            await server.stop(0.5)
