"""grpc.health.v1 for both services: the library's servicer, set without waiting for watchers.

It does not know what makes a service healthy; its owner says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_STATUS = health_pb2.HealthCheckResponse.ServingStatus


class Health(health.aio.HealthServicer):
    """Check and Watch are the library's; List, which it lacks, is ours."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._serving = dict.fromkeys(names, False)
        self._telling: set[asyncio.Task[None]] = set()

    async def register(self, server: grpc.aio.Server, *, reflection: Iterable[str] = ()) -> None:
        """Adds this service, and reflection of the named services when there are any."""
        for name in self._serving:
            await self.set(name, _STATUS.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        names = tuple(reflection)
        if names:
            from grpc_reflection.v1alpha import reflection as reflected

            served = (*names, health.SERVICE_NAME, reflected.SERVICE_NAME)
            reflected.enable_server_reflection(served, server)

    def tell(self, name: str, serving: bool) -> None:
        """Changes a status soon. The library waits for slow watchers, so it does in a task."""
        if self._serving[name] == serving:
            return
        self._serving[name] = serving
        status = _STATUS.SERVING if serving else _STATUS.NOT_SERVING
        task = asyncio.create_task(self.set(name, status), name=f"health {name}")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def List(self, request: Any, context: Any) -> Any:
        """Every service and its status."""
        kinds = {True: _STATUS.SERVING, False: _STATUS.NOT_SERVING}
        answers = {
            name: health_pb2.HealthCheckResponse(status=kinds[serving])
            for name, serving in self._serving.items()
        }
        return health_pb2.HealthListResponse(statuses=answers)
