"""The life of a frontend: listen, serve both faces, drain, stop. It does not know requests."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable

import grpc
import uvicorn

from frontend.api.bounded_http import bounded_http
from frontend.api.grpc_gate import GateInterceptor
from frontend.api.grpc_ingress import IngressInterceptor
from frontend.api.grpc_oip import OipServicer
from frontend.api.grpc_service import add_service
from frontend.api.grpc_text import TextServicer
from frontend.api.routes import build_http
from frontend.config import FrontendConfig
from frontend.desk import FrontDesk
from frontend.gate import Gate
from frontend.limits import check
from frontend.listener import HttpServer, listen
from frontend.template_pool import prepare
from tidemill.runtime.health import Health
from tidemill.runtime.parsing import MalformedRequests
from tidemill.runtime.rpc import bind, server_options
from tidemill.security.health_port import HealthPort
from tidemill.security.server_tls import ServerTls, port_credentials, server_tls
from tidemill.telemetry.event_loop import EventLoopTasks
from tidemill.telemetry.tracer import Tracer

_LOG = logging.getLogger("tidemill.frontend")
_CLOSING_S = 2.0
_KEPT_S = 100
"""How long a connection may lie idle: longer than clients and proxies keep theirs (httpx 5 s, nginx
and AWS 60 s, Go and Traefik 90 s), for a request that comes in the moment of closing is lost."""
_SETTLING_S = 0.05
"""Of quiet before the gRPC server stops: it ends calls that the loop has not accepted yet with
CANCELLED (grpc/grpc#41785), where those that it has are refused as UNAVAILABLE. Of 360 calls a
second that goes for 0 to 3 a stop instead of 0 to 48."""
_PROBE_S = 0.25
_SERVICERS = (TextServicer, OipServicer)
_NAMES = tuple(servicer.contract.full_name for servicer in _SERVICERS)
_READY = ("", "readiness", *_NAMES)
"""What grpc.health.v1 says of these names is whether requests are taken."""


class FrontendServer:
    """A running frontend. `http_port` and `grpc_port` are the bound ones."""

    def __init__(self, config: FrontendConfig, listener: socket.socket) -> None:
        self._config = config
        self._gate = Gate(config)
        self._tls = server_tls(config)
        tracer = Tracer(
            "tidemill-frontend", config.otlp_endpoint, sample_ratio=config.trace_sample_ratio
        )
        self.desk = FrontDesk(config, tracer)
        self.desk.metrics.add(EventLoopTasks(asyncio.get_running_loop()))
        self._health = Health(("liveness", *_READY))
        gates = () if self._gate.is_open else (GateInterceptor(self._gate),)
        self._grpc = grpc.aio.server(
            interceptors=(
                IngressInterceptor(self.desk, self._gate),
                *gates,
                MalformedRequests(),
            ),
            options=server_options(config.max_message_bytes),
        )
        self._http = HttpServer(
            uvicorn.Config(
                build_http(self.desk, self._gate),
                http=bounded_http(config.read_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # the gate knows which proxies to trust
                ssl_context_factory=_context_of(self._tls),
                timeout_keep_alive=_KEPT_S,
                timeout_graceful_shutdown=int(_CLOSING_S),
            ),
            listener,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.http_port: int = listener.getsockname()[1]
        self.grpc_port = 0
        self._probes: HealthPort | None = None

    @property
    def health_port(self) -> int | None:
        """The bound one, if probes have one of their own."""
        return None if self._probes is None else self._probes.port

    @classmethod
    async def start(cls, config: FrontendConfig) -> FrontendServer:
        """Listens at once and connects to the engine behind it.

        Raises FailedPrecondition naming port and flag when a port is taken, and what
        `limits.check` does.
        """
        check(config)
        listener = listen(config.host, config.http_port)
        try:
            server = cls(config, listener)
        except BaseException:
            listener.close()
            raise
        try:
            await server._open()
        except BaseException:
            listener.close()
            await server.desk.close()
            raise
        return server

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit status. A second signal hurries."""
        stop, hurry = asyncio.Event(), asyncio.Event()

        def signalled() -> None:
            (hurry if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled)
        await stop.wait()
        tasks = [asyncio.create_task(self.drain()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stop()
        return 0

    async def drain(self) -> None:
        """Not ready any more. After `drain_pause_s` connections and gRPC calls are refused; what
        runs finishes, at most within `drain_timeout_s`."""
        _LOG.info("draining", extra={"requests": self.desk.num_live})
        for name in _READY:
            self._health.tell(name, False)
        await self.desk.announce_drain()
        await self._http.refuse()
        await asyncio.gather(self.desk.drain(), self._http.finish(self._config.drain_timeout_s))

    async def stop(self) -> None:
        """Ends what still runs, both faces, then the session with the engine."""
        self.desk.cut_short()
        self._http.should_exit = True
        await asyncio.sleep(_SETTLING_S)
        await self._grpc.stop(_CLOSING_S)
        watch, serving = self._tasks
        watch.cancel()
        await asyncio.gather(watch, serving, return_exceptions=True)
        if self._probes is not None:
            await self._probes.close()
        await self.desk.close()
        _LOG.info("stopped")

    async def _open(self) -> None:
        config = self._config
        for servicer in _SERVICERS:
            add_service(self._grpc, servicer(self.desk, self._gate))
        await self._health.register(self._grpc, reflection=_NAMES if config.reflection else ())
        self._health.tell("liveness", True)
        credentials = port_credentials(self._tls)
        self.grpc_port = bind(
            self._grpc, config.host, config.grpc_port, flag="--grpc-port", credentials=credentials
        )
        if config.health_port is not None:
            self._probes = await HealthPort.open(self._health, config.host, config.health_port)
        await self._grpc.start()
        prepare()
        self.desk.fleet.start()
        self._tasks = [
            asyncio.create_task(self._follow(), name="readiness"),
            asyncio.create_task(self._http.run_until_told(), name="http"),
        ]
        _LOG.info(
            "listening",
            extra={
                "http": f"{'https' if self._tls else 'http'}://{config.host}:{self.http_port}",
                "grpc_port": self.grpc_port,
                "health_port": self.health_port,
            },
        )

    async def _follow(self) -> None:
        """gRPC health follows the desk: ready while it takes requests."""
        if not await self.desk.fleet.wait_ready(self._config.connect_timeout_s):
            _LOG.warning(
                "still no engine after %g s: %s",
                self._config.connect_timeout_s,
                self.desk.fleet.last_error,
            )
        last = None
        while True:
            state = self.desk.state
            if state != last:
                for name in _READY:
                    self._health.tell(name, state == "ready")
                _LOG.info("state: %s", state)
                last = state
            await asyncio.sleep(_PROBE_S)


def _context_of(tls: ServerTls | None) -> Callable[..., ssl.SSLContext] | None:
    """What uvicorn asks for its context; None: plaintext."""
    return None if tls is None else lambda config, default: tls.http_context()
