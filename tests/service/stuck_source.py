"""Runs a prefill engine that sends one piece of a prompt and no more, until somebody kills it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tests.service.test_transfer_in import Source, listen
from tidemill.v1 import engine_pb2_grpc as rpc


class Stuck(Source):
    async def Transfer(self, requests: Any, context: Any) -> None:
        await super().Transfer(requests, context)
        await asyncio.Event().wait()


async def main() -> None:
    server = grpc.aio.server()
    rpc.add_KvTransferServiceServicer_to_server(Stuck(), server)
    port = listen(server, None)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
