"""One run of `tidemill bench serve`: whom to ask, one point after the other, and their figures.

Against any OpenAI-compatible address, TextService over gRPC, or services that this starts. Requests
of an open loop begin at times drawn beforehand, whatever the server does, and every latency counts
from that time. It does not know protocols.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine_service.config import EngineConfig
from tidemill.bench.early import kept_if_ended
from tidemill.bench.places import check_place
from tidemill.bench.services import services_of
from tidemill.bench.traffic.client import Share, Told
from tidemill.bench.traffic.clients import run_clients
from tidemill.bench.traffic.figures import Slo, Window, figures
from tidemill.bench.traffic.look_up import first_model
from tidemill.bench.traffic.options import LOADS, ServeOptions, points_of
from tidemill.bench.traffic.picture import check_drawable, draw
from tidemill.bench.traffic.points import Point
from tidemill.bench.traffic.target import Target
from tidemill.runtime.errors import InvalidRequest, Unavailable
from tidemill.runtime.options import settings_of
from tidemill.security.client_tls import ClientTls

_BUSY_SHARE = 0.8
_LATE_MS = 20.0


def run(options: ServeOptions, config: EngineConfig) -> dict[str, Any]:
    """The figures of every point. Raises InvalidRequest for values that cannot work, Unavailable
    where nobody answers, Unsupported for --plot without matplotlib, RuntimeError when a service
    or a client process fails."""
    kind, points = points_of(options)
    changed = _changed(config)
    if options.urls and changed:
        raise InvalidRequest(f"{changed[0]} is for services that this starts; --url names others")
    if options.plot:
        check_drawable()
        check_place(Path(options.plot), "plot")
    rows: list[dict[str, Any]] = []
    with _urls(options, config) as urls:
        target = _target(options, urls)
        chosen = {name: value for name, value in asdict(options).items() if name != "api_key"}
        started = {} if options.urls else {name: getattr(config, name) for name in changed}
        found = {
            "options": chosen,
            "engine_options": started,
            "model": target.model,
            "load": LOADS[kind],
            "points": rows,
        }
        with kept_if_ended(found, rows):
            for point in points:
                rows.append(_measured(options, target, point, LOADS[kind]))
    if options.plot:
        draw(rows, LOADS[kind], options.plot)
        print(f"picture in {options.plot}", file=sys.stderr)
    return found


def check(found: dict[str, Any]) -> None:
    """Raises Unavailable where not one request was answered: a script may not read on then."""
    points = found["points"]
    if any(point["ok"] for point in points):
        return
    failures = [(how, one) for point in points for how, one in point["failures"].items()]
    told = "".join(f": {how}, {one['said']}" for how, one in failures[:1])
    asked = sum(point["requests"] for point in points)
    raise Unavailable(f"none of {asked} requests was answered{told}")


def _changed(config: EngineConfig) -> list[str]:
    """Fields that are not at their defaults."""
    settings = settings_of(EngineConfig)
    return [name for name, one in settings.items() if getattr(config, name) != one.default]


@contextmanager
def _urls(options: ServeOptions, config: EngineConfig) -> Iterator[tuple[str, ...]]:
    if options.urls:
        yield options.urls
        return
    print("starting the services ...", file=sys.stderr)
    with services_of(
        config, options.frontends, options.shape, options.data_parallel_size
    ) as services:
        ports = services.grpc_ports if options.protocol == "grpc" else services.ports
        yield tuple(f"http://127.0.0.1:{port}" for port in ports)


def _target(options: ServeOptions, urls: tuple[str, ...]) -> Target:
    target = Target(
        urls=urls,
        is_grpc=options.protocol == "grpc",
        is_chat=options.api == "chat",
        model=options.served_model or "",
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        timeout_s=options.timeout_s,
        api_key=options.api_key,
        tls=ClientTls(options.tls_ca, options.client_cert, options.client_key),
    )
    return target if target.model else replace(target, model=first_model(target))


def _measured(options: ServeOptions, target: Target, point: Point, unit: str) -> dict[str, Any]:
    share = Share(
        target=target,
        source=point.source,
        starts=point.starts,
        numbers=range(len(point.starts)),
        streams=point.streams,
        until_s=point.until_s,
    )
    with _progress(f"{point.load:g} {unit}", len(point.starts) or None) as on_progress:
        ran = run_clients(share, options.clients, on_progress)
    window = Window(ran.began + point.warm_up_s, ran.began + point.until_s)
    slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms, options.slo_e2e_ms)
    found = {"load": point.load} | figures(ran.answers, window, slo)
    found["client_cpu_share"] = round(ran.cpu_share, 3)
    late_ms = found["lag_ms"].get("p99", 0.0)
    if ran.cpu_share > _BUSY_SHARE or late_ms > _LATE_MS:
        print(
            f"the generator itself was busy ({ran.cpu_share:.0%} of a core) or late (p99 "
            f"{late_ms:.0f} ms, counted in all latencies): try more --clients than "
            f"{options.clients}, or a machine of its own",
            file=sys.stderr,
        )
    return found


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[Any]:
    """A bar on the terminal, where there is one; the number of requests is known in advance unless
    the loop is closed."""
    console = Console(stderr=True)
    columns = [*Progress.get_default_columns()] if total else [SpinnerColumn()]
    text = TextColumn("{task.fields[told]}")
    with Progress(
        TextColumn(label), *columns, TimeElapsedColumn(), text,
        console=console, disable=not console.is_terminal, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=total, told="")

        def show(told: Told) -> None:
            line = f"{told.begun - told.ended} open, {told.ended} ended, {told.failed} failed"
            bar.update(task, completed=told.ended, told=line)

        yield show
