"""KvTransferService: KV of prompts for other engines.

The handler is a shell around an object of its own; statuses come from ServiceError alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from engine_service.pieces import Views
from engine_service.server.desk import Desk
from engine_service.server.transfer_out import MAX_SENDING, Sending
from tidemill.runtime.rpc import answering
from tidemill.v1 import engine_pb2_grpc


class TransferServicer(engine_pb2_grpc.KvTransferServiceServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._slots = asyncio.Semaphore(MAX_SENDING)
        self._views = Views()

    async def Transfer(self, requests: Any, context: Any) -> None:
        task, sending = asyncio.current_task(), self._desk.sending
        assert task is not None, "a handler runs in a task"
        sending.add(task)
        try:
            async with answering(context):
                await Sending(self._desk, context, self._slots, self._views).run()
        finally:
            sending.discard(task)
