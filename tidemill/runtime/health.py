"""grpc.health.v1 for both services, with a Watch that lasts and a `set` that never blocks.

It does not know what makes a service healthy; its owner says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidemill.runtime.errors import NotFound
from tidemill.runtime.rpc import abort


class Health(health_pb2_grpc.HealthServicer):
    """Own, because clients re-subscribe in a tight loop when a Watch ends, and the stock servicer
    waits for its slowest watcher when a status changes."""

    def __init__(self, names: Iterable[str]) -> None:
        self._serving = dict.fromkeys(names, False)
        self._changed = asyncio.Event()

    def set(self, name: str, serving: bool) -> None:
        """Never blocks: a watcher that does not read only misses intermediate states."""
        self._serving[name] = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def _answer(self, name: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse.ServingStatus
        known = {True: kinds.SERVING, False: kinds.NOT_SERVING, None: kinds.SERVICE_UNKNOWN}
        return health_pb2.HealthCheckResponse(status=known[self._serving.get(name)])

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._serving:
            error = NotFound(f"unknown service {request.service!r}; known: {list(self._serving)}")
            await abort(context, error)
        return self._answer(request.service)

    async def List(self, request: Any, context: Any) -> Any:
        answers = {name: self._answer(name) for name in self._serving}
        return health_pb2.HealthListResponse(statuses=answers)

    async def Watch(self, request: Any, context: Any) -> None:
        last = None
        while True:
            changed, answer = self._changed, self._answer(request.service)
            if answer != last:
                await context.write(answer)
                last = answer
            await changed.wait()

    def register(self, server: grpc.aio.Server, *, reflection: Iterable[str] = ()) -> None:
        """Adds this service, and reflection of the named services when there are any."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        names = tuple(reflection)
        if names:
            from grpc_reflection.v1alpha import reflection as reflected

            reflected.enable_server_reflection(
                (
                    *names,
                    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                    reflected.SERVICE_NAME,
                ),
                server,
            )
