"""A plaintext port with grpc.health.v1 and nothing else: Kubernetes' probes speak no TLS.

It does not know what makes a service healthy.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2_grpc

from tidemill.runtime.health import Health
from tidemill.runtime.rpc import bind, server_options

_MESSAGE_BYTES = 4096
_CALLS = 64
_CLOSING_S = 0.5


class HealthPort:
    """Answers what `health` is told, until it is closed. `port` is the bound one."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    @classmethod
    async def open(cls, health: Health, host: str, port: int) -> HealthPort:
        """Raises FailedPrecondition when the port is taken."""
        options = server_options(_MESSAGE_BYTES)
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_CALLS)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        bound = bind(server, host, port, flag="--health-port")
        await server.start()
        return cls(server, bound)

    async def close(self) -> None:
        """Ends its watchers too."""
        await self._server.stop(_CLOSING_S)
