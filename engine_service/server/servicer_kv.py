"""KvEventService: which prefixes this engine holds, as they come and go."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from engine_service.server.convert_kv import kv_message
from engine_service.server.desk import Desk
from tidemill.runtime.rpc import answering
from tidemill.v1 import engine_pb2_grpc


class KvEventServicer(engine_pb2_grpc.KvEventServiceServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Subscribe(self, request: Any, context: Any) -> None:
        async with answering(context):
            self._desk.open_facts()
            async with aclosing(self._desk.kv_feed.follow(request.start_seq)) as batches:
                async for batch in batches:
                    await context.write(kv_message(batch))
