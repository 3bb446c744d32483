"""The life of an engine server: start, serve, drain, stop, and what happens when the core dies.

It does not know models; the rank process does.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import grpc

from engine_service.config import EngineConfig
from engine_service.core.messages import Fatal, Shutdown
from engine_service.server.desk import Desk
from engine_service.server.freed_memory import keep_freed_memory
from engine_service.server.metrics_port import MetricsPort
from engine_service.server.rank_process import RANK_MODULE, RankProcess
from engine_service.server.servicer import EngineServicer
from engine_service.server.servicer_info import InfoServicer
from engine_service.server.servicer_kv import KvEventServicer
from engine_service.server.servicer_transfer import TransferServicer
from engine_service.server.sideline import Sideline
from engine_service.server.state import SERVING, EngineState, Snapshot
from engine_service.server.status_pages import status_pages
from engine_service.server.vllm_engine.servicer import VLLM_ENGINE, add_vllm_engine
from tidemill.runtime import log
from tidemill.runtime.health import Health
from tidemill.runtime.parsing import MalformedRequests
from tidemill.runtime.rpc import bind, server_options
from tidemill.security.health_port import HealthPort
from tidemill.security.server_tls import port_credentials, server_tls
from tidemill.telemetry.event_loop import EventLoopTasks
from tidemill.telemetry.tracer import Tracer
from tidemill.v1 import engine_pb2_grpc

_SERVICES = ("EngineService", "EngineInfoService", "KvEventService", "KvTransferService")
_NAMES = tuple(f"tidemill.v1.{name}" for name in _SERVICES)
_CLOSING_S = 1.0  # for streams to send what they still hold; core death must exit within 2 s
_LEAVING_S = 5.0
"""For the core, which lets its ranks leave. One that loads or is lost does not listen."""
_LOG = logging.getLogger("tidemill.engine")


class EngineServer:
    """A running engine server. `port` is the bound one; `desk` is for tests and benches."""

    def __init__(self, config: EngineConfig, rank: RankProcess) -> None:
        self._config = config
        self._rank = rank
        self._tracer = Tracer(
            "tidemill-engine", config.otlp_endpoint, sample_ratio=config.trace_sample_ratio
        )
        self.desk = Desk(config, tracer=self._tracer, post_mortem=rank.post_mortem)
        self._names = (*_NAMES, VLLM_ENGINE) if config.vllm_facade else _NAMES
        self._health = Health(("", "liveness", "readiness", *self._names))
        self._server = grpc.aio.server(
            interceptors=(MalformedRequests(),), options=server_options(config.max_message_bytes)
        )
        self.sideline = Sideline(config, self.desk)
        self._tls = server_tls(config)
        self._probes: HealthPort | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics: MetricsPort | None = None
        self.port = self.metrics_port = 0

    @property
    def health_port(self) -> int | None:
        """The bound one, if probes have one of their own."""
        return None if self._probes is None else self._probes.port

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        rank_module: str = RANK_MODULE,
        on_state: Callable[[Snapshot], None] | None = None,
    ) -> EngineServer:
        """Binds the port at once and loads behind it; FailedPrecondition when the port is taken.

        The rank is spawned before any gRPC object exists. `on_state` hears every state change.
        """
        if config.role != "both":
            keep_freed_memory()
        rank = RankProcess(rank_module)
        try:
            server = cls(config, rank)
            await server._open(on_state)
        except BaseException:
            rank.sock.close()
            await asyncio.to_thread(rank.stop, 0.0)
            raise
        return server

    def _open_metrics(self) -> None:
        """Bound at once, like the gRPC port: a probe sees the engine load."""
        config = self._config
        if config.metrics_port is None:
            return
        tasks = EventLoopTasks(asyncio.get_running_loop())
        self.desk.observer.metrics.registry.register(tasks)
        pages = status_pages(self.desk, config.metrics_alias)
        self._metrics = MetricsPort(config.host, config.metrics_port, pages)
        self.metrics_port = self._metrics.port

    async def _open(self, on_state: Callable[[Snapshot], None] | None) -> None:
        config, desk, server = self._config, self.desk, self._server
        engine_pb2_grpc.add_EngineServiceServicer_to_server(EngineServicer(desk), server)
        engine_pb2_grpc.add_EngineInfoServiceServicer_to_server(InfoServicer(desk), server)
        engine_pb2_grpc.add_KvEventServiceServicer_to_server(KvEventServicer(desk), server)
        engine_pb2_grpc.add_KvTransferServiceServicer_to_server(TransferServicer(desk), server)
        if config.vllm_facade:
            add_vllm_engine(desk, server)
            _LOG.info("serving %s for gateways", VLLM_ENGINE)
        await self._health.register(server, reflection=self._names if config.reflection else ())
        self._open_metrics()
        credentials = port_credentials(self._tls)
        self.port = bind(
            server, config.host, config.engine_port, flag="--engine-port", credentials=credentials
        )
        if config.health_port is not None:
            self._probes = await HealthPort.open(self._health, config.host, config.health_port)
        await self.sideline.open(port_credentials(self._tls))
        await server.start()
        desk.board.move(EngineState.LOADING, "starting the core process")
        await desk.core.open(self._rank.sock)
        desk.core.tell(config)
        self.sideline.listen()
        self._tasks = [
            asyncio.create_task(self._follow(on_state)),
            asyncio.create_task(desk.tick()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._check_ended)

    def _check_ended(self, task: asyncio.Task[None]) -> None:
        """Without its ticker, or who tells its health, an engine would look well for ever."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            _LOG.error("the engine server failed", exc_info=bug)
            self.desk.core.give_up(Fatal(f"its server failed: {type(bug).__name__}: {bug}"))

    async def _follow(self, on_state: Callable[[Snapshot], None] | None) -> None:
        """Health follows the state: alive until the core is dead, ready only while serving."""
        last = None
        async for snapshot in self.desk.board.watch():
            alive = snapshot.state not in (EngineState.ERROR, EngineState.SHUTDOWN)
            self._health.tell("liveness", alive)
            for name in ("", "readiness", *self._names):
                self._health.tell(name, snapshot.is_ready)
            if on_state is not None and snapshot[1:3] != last:
                on_state(snapshot)
            last = snapshot[1:3]

    async def run(self) -> int:
        """Serves until SIGTERM, SIGINT, AdminService.Drain or the core's death; returns the exit
        status."""
        stop = self.desk.stop
        hurry = asyncio.Event()

        heard = asyncio.Event()

        def signalled() -> None:
            """The second signal is in a hurry; the first one behind AdminService.Drain is not."""
            (hurry if heard.is_set() else heard).set()
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled)
        if not await _first(stop, self.desk.dead):
            await self._stop_after_death()
            return 1
        drained = asyncio.create_task(self.drain())
        second = asyncio.create_task(hurry.wait())
        await asyncio.wait({drained, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, second):
            task.cancel()
        await asyncio.gather(drained, second, return_exceptions=True)
        lost = self.desk.core.lost
        if lost is not None:
            when = "loading" if self.desk.facts is None else "draining"
            _LOG.error("%s while %s", lost, when)
        await self.stop()
        return 0 if lost is None else 1

    async def drain(self) -> None:
        """Not ready at once; refuses new requests after `drain_pause_s`, and waits for the running
        ones, at most `drain_timeout_s` or what AdminService.Drain says. While it loads there is
        nothing to wait for.

        What still runs then ends with UNAVAILABLE behind its partial output.
        """
        desk = self.desk
        if desk.board.state not in SERVING:
            return
        desk.drain()
        if self._config.drain_pause_s > 0:
            await asyncio.sleep(self._config.drain_pause_s)
        desk.refuse()
        await desk.finish()

    async def stop(self) -> None:
        """Ends what still runs with UNAVAILABLE, then the streams, the core, and the spans'
        exporter."""
        desk = self.desk
        desk.refuse()
        if desk.board.state in SERVING:
            desk.drain()
        if desk.board.state is EngineState.LOADING:
            desk.board.move(EngineState.ERROR, "stopped before it was ready")
            _LOG.info("stopped before it was ready")
        if desk.board.state is EngineState.DRAINING:
            desk.board.move(EngineState.SHUTDOWN, "stopped")
        if desk.core.num_live:
            desk.cut_short("does not wait for running requests")
        desk.drained.set()
        desk.close_sessions(desk.core.lost)
        await asyncio.gather(self._server.stop(_CLOSING_S), self.sideline.stop(_CLOSING_S))
        if self._probes is not None:
            await self._probes.close()
        await desk.fetches.close()
        desk.core.command(Shutdown())
        await asyncio.sleep(0)
        listens = desk.facts is not None and desk.core.lost is None
        await asyncio.to_thread(self._rank.stop, _LEAVING_S if listens else _CLOSING_S)
        desk.core.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        await asyncio.to_thread(self._tracer.stop)

    async def _stop_after_death(self) -> None:
        lost = self.desk.core.lost
        assert lost is not None
        if self.desk.facts is None:  # it would fail again: the reason says what to change
            _LOG.error("%s", lost, extra=log.START_REFUSED)
        else:
            _LOG.error("%s; this process ends, restart it", lost)
        await self.stop()


async def _first(wanted: asyncio.Event, other: asyncio.Event) -> bool:
    """Waits for either; True when `wanted` is set."""
    tasks = [asyncio.create_task(event.wait()) for event in (wanted, other)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return wanted.is_set() and not other.is_set()
