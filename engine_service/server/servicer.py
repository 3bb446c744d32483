"""EngineService: the RPCs that make tokens.

Each handler is a shell around an object of its own; statuses come from ServiceError alone.
"""

from __future__ import annotations

from typing import Any

from engine_service.server.convert_out import abort_response
from engine_service.server.desk import Desk
from engine_service.server.generation import Generation
from engine_service.server.pool_call import PoolCall
from engine_service.server.session import Session
from tidemill.runtime.rpc import answering
from tidemill.v1 import engine_pb2_grpc


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Session(self, requests: Any, context: Any) -> None:
        async with answering(context):
            await Session(self._desk, context).run()

    async def Generate(self, request: Any, context: Any) -> None:
        async with answering(context):
            await Generation(self._desk, context).run(request)

    async def Pool(self, request: Any, context: Any) -> Any:
        async with answering(context):
            return await PoolCall(self._desk).run(request, context.time_remaining())

    async def Abort(self, request: Any, context: Any) -> Any:
        """All ids are looked at before anything is answered; repeating a call changes nothing."""
        async with answering(context):
            outcomes = {name: self._desk.core.abort_request(name) for name in request.request_ids}
            session = self._desk.sessions.get(request.all_of_session)
            if session is not None:
                outcomes.update(dict.fromkeys(session.abort_all(), True))
            elif request.all_of_session:
                outcomes[request.all_of_session] = None
            return abort_response(outcomes)
