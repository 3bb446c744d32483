"""The services as an operator starts them, for a benchmark: `tidemill serve`, more frontends beside
it or frontends alone, and the CPU time of every process. It does not know what is asked of them.
"""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from engine_service.config import EngineConfig
from engine_service.model_folder import check_model
from tidemill.bench.engines import refuse_model
from tidemill.bench.shapes import read_shape, shape_folder
from tidemill.bench.tokenizer import write_tokenizer
from tidemill.runtime.options import flag_of, settings_of

_HOST = "127.0.0.1"
_START_S = 1800.0
"""A large model that is compiled and captured for the first time."""
_STOP_S = 20.0
_ASK_EVERY_S = 0.2
_FREE_PORTS = range(10_000, 30_000)
"""Below what Linux gives away by itself (32,768 and up)."""
_TOLD_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Services:
    """Running services: `ports` speak HTTP and `grpc_ports` gRPC, one of each per frontend."""

    ports: list[int]
    grpc_ports: list[int]
    processes: Mapping[str, psutil.Process]
    """By role: supervisor, engine server, rank 0, frontend 0, ...; of several engines `engine 1
    server` and `engine 1 rank 0`."""

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of every process since its start."""
        return {role: sum(one.cpu_times()[:2]) for role, one in self.processes.items()}


@contextmanager
def running_services(
    config: EngineConfig, num_frontends: int, num_engines: int = 1
) -> Iterator[Services]:
    """Engines with `num_frontends` frontends on free ports, ready; stopped at the end.

    Raises what `check_model` does, and RuntimeError with the end of its log when one of them ends
    before it is ready.
    """
    check_model(config.model)
    free = free_row(num_engines + 2 * num_frontends)
    engine_ports, others = free[:num_engines], free[num_engines:]
    flags = [*_engine_flags(config), f"--engine-port={engine_ports[0]}", "--drain-timeout-s=1"]
    if num_engines > 1:
        flags.append(f"--data-parallel-size={num_engines}")
    beside = [_frontend(*engine_ports)] * (num_frontends - 1)
    with _started([["serve", *flags], *beside], others) as (processes, ports, grpc_ports):
        yield Services(ports, grpc_ports, _roles(processes))


@contextmanager
def services_of(
    config: EngineConfig, num_frontends: int, shape: str | None, num_engines: int = 1
) -> Iterator[Services]:
    """The same; a shape gets random weights and a tokenizer of its size instead of a model."""
    if shape is None:
        with running_services(config, num_frontends, num_engines) as services:
            yield services
        return
    refuse_model(config)
    with shape_folder(shape) as folder:
        write_tokenizer(folder, read_shape(shape)["vocab_size"])
        config = replace(config, model=str(folder), load_format="dummy")
        with running_services(config, num_frontends, num_engines) as services:
            yield services


@contextmanager
def running_frontends(engine_port: int, num_frontends: int, *flags: str) -> Iterator[Services]:
    """Frontends alone, for an engine that somebody else runs; otherwise as `running_services`."""
    words = [*_frontend(engine_port), *flags]
    free = free_row(2 * num_frontends)
    with _started([words] * num_frontends, free) as (processes, ports, grpc_ports):
        roles = {f"frontend {n}": psutil.Process(one.pid) for n, one in enumerate(processes)}
        yield Services(ports, grpc_ports, roles)


def _frontend(*engine_ports: int) -> list[str]:
    address = "--engine=" + ",".join(f"{_HOST}:{port}" for port in engine_ports)
    return ["frontend", address, f"--connect-timeout-s={_START_S}", "--drain-timeout-s=1"]


@contextmanager
def _started(
    commands: list[list[str]], free: list[int]
) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[int], list[int]]]:
    """The commands, each with two of the free ports, all ready: processes, HTTP and gRPC ports."""
    http_ports, grpc_ports = free[::2], free[1::2]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-log-")))
        started = []
        for number, words in enumerate(commands):
            ports = [f"--http-port={http_ports[number]}", f"--grpc-port={grpc_ports[number]}"]
            log = folder / f"{number}.log"
            started.append((stack.enter_context(_child([*words, *ports], log)), log))
        _wait_ready(http_ports, started)
        yield [process for process, _ in started], http_ports, grpc_ports
        if ended := _ended(started):
            raise RuntimeError(f"a service has ended meanwhile:\n{_end_of(ended[0])}")


def _engine_flags(config: EngineConfig) -> list[str]:
    """The flags that make an equal config in another process."""
    settings = settings_of(EngineConfig)
    values = {name: getattr(config, name) for name in settings}
    return [flag_of(n, value) for n, value in values.items() if value != settings[n].default]


@contextmanager
def _child(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`tidemill WORDS` until the end of the block; our own flags have read the environment."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("TIDEMILL_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidemill", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(ports: list[int], started: list[tuple[subprocess.Popen[bytes], Path]]) -> None:
    give_up = time.monotonic() + _START_S
    while not all(map(_is_healthy, ports)):
        ended = _ended(started)
        if ended or time.monotonic() > give_up:
            log = ended[0] if ended else started[0][1]
            raise RuntimeError(f"the services are not ready:\n{_end_of(log)}")
        time.sleep(_ASK_EVERY_S)


def _ended(started: list[tuple[subprocess.Popen[bytes], Path]]) -> list[Path]:
    """Logs of those that run no more."""
    return [log for process, log in started if process.poll() is not None]


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-_TOLD_CHARS:]


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=5)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _roles(started: list[subprocess.Popen[bytes]]) -> dict[str, psutil.Process]:
    """The processes below `tidemill serve` and beside it, by what they do."""
    supervisor = psutil.Process(started[0].pid)
    below = sorted(supervisor.children(), key=lambda one: one.pid)
    servers = [one for one in below if one.cmdline()[2] == "engine_service"]
    roles = {"supervisor": supervisor}
    for engine, server in enumerate(servers):
        which = f"engine {engine} " if len(servers) > 1 else ""
        roles[f"{which}server" if which else "engine server"] = server
        ranks = sorted(server.children(recursive=True), key=lambda one: one.pid)
        roles |= {f"{which}rank {number}": rank for number, rank in enumerate(ranks)}
    fronts = [one for one in below if one.cmdline()[2] == "frontend"]
    fronts += [psutil.Process(process.pid) for process in started[1:]]
    return roles | {f"frontend {number}": one for number, one in enumerate(fronts)}


def free_row(count: int) -> list[int]:
    """Free ports that follow each other. Services listen there seconds later, so they are none that
    the system gives away meanwhile, to port 0 or to whoever calls out."""
    while True:
        first = random.SystemRandom().choice(_FREE_PORTS)
        row = list(range(first, first + count))
        try:
            with ExitStack() as stack:
                for port in row:
                    stack.enter_context(socket.socket()).bind((_HOST, port))
        except OSError:
            continue
        return row
