"""What a frontend carries: short chats and streamed tokens per second, and how late they come.

Real frontend processes, real HTTP and gRPC on loopback; the engine keeps time and computes nothing
(`clock_engine`). Every token says when it was sent, so what a frontend adds is measured token by
token. Load generators are processes of their own, whose CPU time is among the figures. It does not
know bytes or sessions.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import tidemill
from tidemill.bench.bounds import AboveZero, OneOrMore
from tidemill.bench.chats import grpc_chat, grpc_path, http_chat
from tidemill.bench.clock import write_clock
from tidemill.bench.clock_engine import ClockEngine, clock_engine
from tidemill.bench.load import Plan, Seen, generate_load
from tidemill.bench.percentiles import percentiles_ms
from tidemill.bench.services import Services, running_frontends

_MODEL = Path(tidemill.__file__).parent / "builtin" / "demo"
"""Whose tokenizer and chat template the prompts go through."""
_WARM_UP = 0.25
_SPARE = 4
"""Connections for each that a full load keeps busy, where requests are sent when they are due."""
_UNARY_STEP_S = 0.005
_SHORTEST, _SPREAD = 128, 257
_PACKAGES = (
    "fastapi",
    "grpcio",
    "httptools",
    "orjson",
    "protobuf",
    "tokenizers",
    "uvicorn",
    "uvloop",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """What is measured."""

    frontends: OneOrMore = 2
    """Everything is measured with one process, and the full loads again with this many."""
    concurrency: OneOrMore = 64
    """Unary chats that are open at any time, for each frontend."""
    answer_len: OneOrMore = 8
    """Tokens of a unary answer; steps take 5 ms."""
    streams: OneOrMore = 256
    """Streams that are open at any time, for each frontend; answers have 128 to 384 tokens."""
    sse_tokens_per_s: OneOrMore = 40_000
    """Tokens that the engine sends each frontend for its SSE streams."""
    grpc_tokens_per_s: OneOrMore = 50_000
    """The same for gRPC streams."""
    seconds: AboveZero = 8.0
    """Length of each measurement, after a quarter of it as warm-up."""
    halves: bool = True
    """One process is measured at halves of the loads too, which say how promptly it answers."""


class _Load(NamedTuple):
    """One measurement: `face` is http or grpc. Rates are per frontend; None: as many as go.

    `wanted` requests or tokens per second are what one process is to carry; half of them is the
    load at which it is to answer promptly.
    """

    name: str
    face: str
    streams: int
    """Open at any time; 0: whole answers."""
    step_s: float
    wanted: int
    rate: float | None = None

    def halves(self) -> list[_Load]:
        """Half of what is wanted. Of streams there are half as many, at the pace that was wanted;
        and, harder because one step of the engine is written all at once, as many at half of it.
        """
        if not self.streams:
            return [self._replace(name=f"{self.name}, half", rate=self.wanted / 2)]
        few, pace_s = self.streams // 2, self.streams / self.wanted
        return [
            self._replace(name=f"{self.name}, half as many", streams=few, step_s=pace_s),
            self._replace(name=f"{self.name}, half as fast", step_s=2 * pace_s),
        ]


def run(options: FrontendOptions) -> dict[str, Any]:
    """The figures of every load. Raises RuntimeError when an answer was not complete."""
    results: dict[str, Any] = {"options": asdict(options), "machine": _machine()}
    for count in sorted({1, options.frontends}):
        with _stack(count) as (engine, services):
            results[f"{count}_frontend{'s' if count > 1 else ''}"] = _measured(
                options, engine, services, with_halves=options.halves and count == 1
            )
    return results


def table(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    lines = []
    for group, loads in results.items():
        if "_frontend" not in group:
            continue
        lines.append((group.replace("_", " "), ""))
        for name, found in loads.items():
            unit = "tokens" if "stream" in name else "requests"
            lines += [
                (f"  {name}", f"{found[f'{unit}_per_s']:>10,.0f} {unit}/s"),
                ("    added ms", _listed(found["added_ms"])),
                ("    token late ms", _listed(found["late_ms"])),
                ("    tokens per chunk", f"{found['tokens_per_chunk']:.2f}"),
                ("    cores", _listed(found["cpu_share"])),
            ]
    return lines


def _listed(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.2f}" for name, value in figures.items())


@contextmanager
def _stack(num_frontends: int) -> Iterator[tuple[ClockEngine, Services]]:
    with tempfile.TemporaryDirectory(prefix="tidemill-clock-") as name:
        first = write_clock(_MODEL, Path(name))
        with (
            clock_engine(first) as engine,
            running_frontends(engine.port, num_frontends, f"--tokenizer={name}") as services,
        ):
            yield engine, services


def _measured(
    options: FrontendOptions, engine: ClockEngine, services: Services, *, with_halves: bool
) -> dict[str, Any]:
    """By name."""
    many = options.streams
    sse_s, grpc_s = many / options.sse_tokens_per_s, many / options.grpc_tokens_per_s
    loads = [
        _Load("unary HTTP", "http", 0, _UNARY_STEP_S, 1_200),
        _Load("unary gRPC", "grpc", 0, _UNARY_STEP_S, 1_200),
        _Load("SSE streams", "http", many, sse_s, 25_000),
        _Load("gRPC streams", "grpc", many, grpc_s, 40_000),
    ]
    if with_halves:
        loads += [half for load in loads for half in load.halves()]
    return {load.name: _one(options, engine, services, load) for load in loads}


def _one(
    options: FrontendOptions, engine: ClockEngine, services: Services, load: _Load
) -> dict[str, Any]:
    engine.set_step(load.step_s)
    ports = services.ports if load.face == "http" else services.grpc_ports
    plans = [_plan(options, port, load) for port in ports]
    processes = replace(services, processes={**services.processes, "engine": engine.process})
    marks: list[dict[str, float]] = []
    seen = generate_load(plans, lambda: marks.append(processes.cpu_s()))
    before, after = marks
    cpu_s = {role: after[role] - before[role] for role in after} | {"busiest client": seen.cpu_s}
    figures = _figures(seen, cpu_s)
    print(f"{len(ports)} x {load.name}: {figures}", file=sys.stderr)
    return figures


def _plan(options: FrontendOptions, port: int, load: _Load) -> Plan:
    lengths = [options.answer_len]
    concurrency = options.concurrency
    if load.streams:
        lengths = [_SHORTEST + number * 97 % _SPREAD for number in range(_SPREAD)]
        concurrency = load.streams
    is_http = load.face == "http"
    make = http_chat if is_http else grpc_chat
    return Plan(
        port=port,
        path="" if is_http else grpc_path(is_stream=bool(load.streams)),
        contents=[
            make(n, length, is_stream=bool(load.streams)) for n, length in enumerate(lengths)
        ],
        lengths=lengths,
        concurrency=concurrency if load.rate is None else _SPARE * concurrency,
        rate=load.rate,
        warm_up_s=options.seconds * _WARM_UP,
        seconds=options.seconds,
    )


def _figures(seen: Seen, cpu_s: Mapping[str, float]) -> dict[str, Any]:
    return {
        "requests_per_s": round(seen.requests / seen.seconds, 1),
        "tokens_per_s": round(seen.tokens / seen.seconds, 1),
        "tokens_per_chunk": round(len(seen.late_ms) / max(1, seen.chunks), 3),
        "added_ms": percentiles_ms([one / 1e3 for one in seen.added_ms]),
        "late_ms": percentiles_ms([one / 1e3 for one in seen.late_ms]),
        "cpu_share": {role: round(spent / seen.seconds, 3) for role, spent in cpu_s.items()},
        "cpu_us_per_request": _per(cpu_s, seen.requests),
        "cpu_us_per_token": _per(cpu_s, seen.tokens),
    }


def _per(cpu_s: Mapping[str, float], count: int) -> dict[str, float]:
    return {role: round(1e6 * spent / max(1, count), 2) for role, spent in cpu_s.items()}


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }
