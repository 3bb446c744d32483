"""`tidemill serve [MODEL]`: starts an engine and a frontend, and watches over both.

It does not know models or requests; if one service ends, it ends the other and says why.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import replace

import grpc

from engine_service.config import EngineConfig
from frontend.config import FrontendConfig
from tidemill.commands import ports
from tidemill.commands.child import Child, ending
from tidemill.commands.engine_state import probed, serving, stages
from tidemill.commands.screen import Screen
from tidemill.commands.spellings import ours
from tidemill.runtime import options
from tidemill.runtime.errors import EngineDead

_FOREVER_S = 1e6  # the frontend waits for a model of any size; we see when either one ends
_OF_THE_WAY = ("engine", "engine_tls_ca", "engine_tls_cert", "engine_tls_key", "engine_tls_name")
_MARGIN_S = 5.0  # for a service to close down behind its drain timeout
_HEALTH_EVERY_S = 0.1


def run(argv: Sequence[str]) -> int:
    """Serves until SIGTERM, SIGINT or the end of a service; returns the exit status."""
    engine, frontend = options.parse(
        [EngineConfig, FrontendConfig],
        ours(argv),
        prog="tidemill serve",
        positional="model",
        hidden=("connect_timeout_s", *_OF_THE_WAY),
    )
    return asyncio.run(Supervisor(*settled(engine, frontend)).run())


def settled(engine: EngineConfig, frontend: FrontendConfig) -> tuple[EngineConfig, FrontendConfig]:
    """Both as they are started: with free ports, and the engine for this machine alone.

    The engine asks nobody for a key, and certificates and probes are the frontend's.
    """
    home = "::1" if ":" in engine.host else "127.0.0.1"
    chosen = {"--grpc-port": frontend.grpc_port, "--http-port": frontend.http_port}
    if frontend.health_port is not None or frontend.tls_cert is not None:
        chosen["--health-port"] = frontend.health_port or 0
    engine_port = ports.settle(home, {"--engine-port": engine.engine_port})["--engine-port"]
    found = ports.settle(frontend.host, chosen)
    engine = replace(
        engine,
        host=home,
        engine_port=engine_port,
        tls_cert=None,
        tls_key=None,
        tls_client_ca=None,
        health_port=None,
    )
    frontend = replace(
        frontend,
        engine=f"{ports.reachable(home)}:{engine_port}",
        grpc_port=found["--grpc-port"],
        http_port=found["--http-port"],
        health_port=found.get("--health-port"),
        connect_timeout_s=_FOREVER_S,
    )
    return engine, frontend


class Supervisor:
    """Two children and what is said about them."""

    def __init__(self, engine: EngineConfig, frontend: FrontendConfig) -> None:
        self._engine = engine
        self._frontend = frontend
        self._screen = Screen()
        self._stop = asyncio.Event()
        self._children: list[Child] = []

    async def run(self) -> int:
        """Starts both, shows the Ready block, waits for an end, and stops what still runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            # The engine first: it takes longest. Both before any gRPC object exists, which a fork
            # would break.
            await self._start("engine_service", self._engine)
            await self._start("frontend", self._frontend)
            return await self._watch()
        finally:
            self._screen.close()
            # The frontend first: its running requests still need the engine.
            for child in reversed(self._children):
                await child.stop(self._engine.drain_timeout_s + _MARGIN_S)

    async def _start(self, module: str, config: EngineConfig | FrontendConfig) -> None:
        settings = {f"TIDEMILL_{name.upper()}" for name in options.settings_of(type(config))}
        environ = {name: text for name, text in os.environ.items() if name not in settings}
        environ |= _secrets(config)
        child = await Child.start(
            module,
            _arguments(config),
            environ=environ,
            on_line=lambda line: self._screen.line(module, line),
        )
        self._children.append(child)

    async def _watch(self) -> int:
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(self._become_ready())
        ends = {asyncio.create_task(child.wait()): child for child in self._children}
        await asyncio.wait({stop, ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            await asyncio.wait({stop, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stop, ready):
            task.cancel()
        await asyncio.gather(stop, ready, return_exceptions=True)
        if self._stop.is_set():
            return 0
        for end, child in ends.items():
            if end.done():
                self._screen.died(child.module, ending(end.result()))
        return 1

    async def _become_ready(self) -> None:
        """Shows the way to readiness; an engine that fails on it ends, which `_watch` sees."""
        try:
            async for stage in stages(self._frontend.engine):
                self._screen.stage(stage)
            facts = await serving(self._frontend.engine)
        except (EngineDead, grpc.aio.AioRpcError):
            return
        self._screen.stage("frontend")
        host = ports.reachable(self._frontend.host)
        if self._frontend.health_port is None:
            await _healthy(host.strip("[]"), self._frontend.http_port)
        else:  # whoever speaks TLS may ask for a certificate that we have not
            await probed(f"{host}:{self._frontend.health_port}", _HEALTH_EVERY_S)
        self._screen.ready(facts, self._frontend, host)

    def _signalled(self) -> None:
        if self._stop.is_set():  # asked twice: no draining
            for child in self._children:
                child.kill()
        self._stop.set()


def _arguments(config: EngineConfig | FrontendConfig) -> list[str]:
    """The flags that make an equal config in another process."""
    settings = options.settings_of(type(config))
    values = {name: getattr(config, name) for name in settings}
    return [
        options.flag_of(name, value)
        for name, value in values.items()
        if value != settings[name].default and not isinstance(value, options.Secret)
    ]


def _secrets(config: EngineConfig | FrontendConfig) -> dict[str, str]:
    """Variables for the fields that `_arguments` leaves out."""
    values = {name: getattr(config, name) for name in options.settings_of(type(config))}
    return {
        f"TIDEMILL_{name.upper()}": value
        for name, value in values.items()
        if isinstance(value, options.Secret)
    }


async def _healthy(host: str, port: int) -> None:
    """Returns as soon as GET /health answers 200."""
    ask = b"GET /health HTTP/1.1\r\nHost: tidemill\r\nConnection: close\r\n\r\n"
    status = b""
    while b" 200 " not in status:
        await asyncio.sleep(_HEALTH_EVERY_S)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(ask)
            status = await reader.readline()
            writer.close()
