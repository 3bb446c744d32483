"""What an engine serves beside its main port, where it is asked to: AdminService and KV events
over ZeroMQ. It does not know requests."""

from __future__ import annotations

import asyncio

import grpc

from engine_service.config import EngineConfig
from engine_service.server.desk import Desk
from engine_service.server.kv_zmq import KvPublisher
from engine_service.server.servicer_admin import AdminServicer
from engine_service.server.state import SERVING
from tidemill.runtime.parsing import MalformedRequests
from tidemill.runtime.rpc import bind, server_options
from tidemill.v1 import engine_pb2_grpc


class Sideline:
    """open, listen, stop. `admin_port` is the bound one; None: AdminService is not served."""

    def __init__(self, config: EngineConfig, desk: Desk) -> None:
        self._config = config
        self._desk = desk
        self._admin: grpc.aio.Server | None = None
        self._publisher: KvPublisher | None = None
        self._telling: asyncio.Task[object] | None = None
        self.admin_port: int | None = None

    async def open(self, credentials: grpc.ServerCredentials | None) -> None:
        """Raises FailedPrecondition when an address is taken. `credentials` as on the main port."""
        config, desk = self._config, self._desk
        if config.admin_port is not None:
            options = server_options(config.max_message_bytes)
            self._admin = grpc.aio.server(interceptors=(MalformedRequests(),), options=options)
            engine_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(desk), self._admin)
            self.admin_port = bind(
                self._admin,
                config.host,
                config.admin_port,
                flag="--admin-port",
                credentials=credentials,
            )
            await self._admin.start()
        if config.kv_events_zmq is not None:
            endpoint, replay = config.kv_events_zmq, config.kv_events_replay
            self._publisher = KvPublisher(endpoint, replay, config.kv_events_topic)

    def listen(self) -> None:
        """Publishes KV events from the moment the core is up."""
        if self._publisher is not None:
            self._telling = asyncio.create_task(self._tell(self._publisher), name="kv-events")

    async def _tell(self, publisher: KvPublisher) -> None:
        async for snapshot in self._desk.board.watch():
            if snapshot.state in SERVING:
                await self._desk.kv_feed.listen(publisher.publish)
                return

    async def stop(self, grace_s: float) -> None:
        """Answers that are being given have `grace_s` to leave."""
        if self._admin is not None:
            await self._admin.stop(grace_s)
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        if self._publisher is not None:
            self._desk.kv_feed.listeners.clear()
            await self._publisher.close()
