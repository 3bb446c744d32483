"""What tracing costs: CPU time per request of both services, without it, sampled, and always.

Three pairs of services run side by side. A round asks each of them the same, in an order that turns
from round to round, and what they took is compared within the round, so that what the machine does
beside them cancels out. A collector takes the spans. The model is simulated. It does not know what
is traced.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from engine_service.config import EngineConfig
from tidemill.bench.bounds import AboveZero, Bounds, OneOrMore, Share, check_bounds

OFF, SAMPLED, ALWAYS = "off", "sampled", "always"
_SETTLE_S = 6.0
"""Until the last batch of spans is on its way: OpenTelemetry sends what there is every five
seconds."""
_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions:
    """What is measured."""

    rounds: Annotated[int, Bounds(least=2)] = 10
    """Rounds that count; one more is made ahead of them."""
    requests: OneOrMore = 500
    """Streamed completions per round and setting."""
    rate: AboveZero = 125.0
    """How many of them begin per second, at even distances."""
    output_len: OneOrMore = 16
    """Tokens per answer."""
    step_ms: AboveZero = 5.0
    """Step time of the simulated engine."""
    sample_ratio: Share = 0.01
    """Share of the requests that are traced in the setting `sampled`."""


def run(options: TracingOptions) -> dict[str, Any]:
    """Microseconds of CPU per request, by setting and process, and what tracing adds to them.

    Raises InvalidRequest for values that cannot work, RuntimeError when a request fails or the
    collector has not got what the settings say.
    """
    from tidemill.bench.collector import collector
    from tidemill.bench.services import Services, services_of

    check_bounds(options)
    rounds: list[dict[str, dict[str, float]]] = []
    spans: dict[str, int] = {}
    with ExitStack() as stack:
        running: dict[str, Services] = {}
        collectors = {name: stack.enter_context(collector()) for name in (SAMPLED, ALWAYS)}
        for name, ratio in ((OFF, None), (SAMPLED, options.sample_ratio), (ALWAYS, 1.0)):
            print(f"starting the services, tracing {name} ...", file=sys.stderr)
            endpoint = None if ratio is None else collectors[name].endpoint
            config = _config(options, endpoint, ratio)
            running[name] = stack.enter_context(services_of(config, 1, None))
        idle = _idle(running)
        for number in range(options.rounds + 1):
            found = _round(options, running, idle, number)
            if number:
                rounds.append(found)
                print(f"round {number}: {_told(found)}", file=sys.stderr)
        spans = {name: one.num_spans() for name, one in collectors.items()}
    total = options.requests * (options.rounds + 1)
    if spans[ALWAYS] < 2 * total:
        raise RuntimeError(f"{spans[ALWAYS]} spans of {total} requests arrived: fewer than 2 each")
    return {"options": asdict(options), "spans_per_request": _per(spans, total)} | summary(rounds)


def _per(spans: Mapping[str, int], requests: int) -> dict[str, float]:
    return {name: round(count / requests, 4) for name, count in spans.items()}


def _config(options: TracingOptions, endpoint: str | None, ratio: float | None) -> EngineConfig:
    """Both services take the flags of tracing from the engine's."""
    traced: dict[str, Any] = {"otlp_endpoint": endpoint}
    if ratio is not None:
        traced["trace_sample_ratio"] = ratio
    return EngineConfig(
        executor="simulated",
        simulated_step_ms=options.step_ms,
        prefix_caching=False,
        log_level="warning",
        **traced,
    )


Cpu = Mapping[str, Mapping[str, float]]
"""By setting and process."""


def _idle(running: Mapping[str, Any]) -> Cpu:
    """Cores that the processes take while nobody asks them: heartbeats and the like."""
    time.sleep(_SETTLE_S)
    before, began = _spent(running), time.monotonic()
    time.sleep(_SETTLE_S)
    seconds = time.monotonic() - began
    return {
        name: {role: (spent - before[name][role]) / seconds for role, spent in found.items()}
        for name, found in _spent(running).items()
    }


def _round(
    options: TracingOptions, running: Mapping[str, Any], idle: Cpu, number: int
) -> dict[str, dict[str, float]]:
    """CPU microseconds per request, above what the processes take when idle."""
    names = list(running)
    before, began = _spent(running), time.monotonic()
    for name in names[number % len(names) :] + names[: number % len(names)]:
        _ask(options, running[name].ports[0], number)
    time.sleep(_SETTLE_S)
    after, seconds = _spent(running), time.monotonic() - began
    return {
        name: {
            role: 1e6 * (spent - before[name][role] - seconds * idle[name][role]) / options.requests
            for role, spent in found.items()
        }
        for name, found in after.items()
    }


def _spent(running: Mapping[str, Any]) -> Cpu:
    return {name: _cpu_s(services) for name, services in running.items()}


def _cpu_s(services: Any) -> dict[str, float]:
    """Exact CPU seconds of the processes that serve, by the clock that Linux keeps of each; the
    usual counters tick a hundred times a second."""
    return {
        role: time.clock_gettime((~process.pid << 3) | 2)
        for role, process in services.processes.items()
        if role != "supervisor"
    }


def _ask(options: TracingOptions, port: int, number: int) -> None:
    from tidemill.bench.traffic.asked import Drawn, Lengths
    from tidemill.bench.traffic.client import Share
    from tidemill.bench.traffic.clients import run_clients
    from tidemill.bench.traffic.target import Target

    target = Target(
        urls=(f"http://127.0.0.1:{port}",),
        is_grpc=False,
        is_chat=False,
        model="",
        temperature=0.0,
        ignore_eos=True,
        timeout_s=60.0,
    )
    lengths = Lengths(_LENGTH, options.output_len, 0.0)
    share = Share(
        target=target,
        source=Drawn(lengths, 256, is_chat=False, seed=str(number)),
        starts=[at / options.rate for at in range(options.requests)],
        numbers=range(options.requests),
    )
    failed = [one for one in run_clients(share, 1).answers if not one.is_ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].status} {failed[0].said}")


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds; what a setting adds is taken round by round, so that its median,
    quartiles and extremes are those of paired differences. Microseconds of CPU per request."""
    per_request: dict[str, dict[str, float]] = {}
    added: dict[str, dict[str, dict[str, float]]] = {}
    for name in (OFF, SAMPLED, ALWAYS):
        columns = {role: [one[name][role] for one in rounds] for role in rounds[0][name]}
        columns["both services"] = [sum(one[name].values()) for one in rounds]
        per_request[name] = {r: round(statistics.median(c), 1) for r, c in columns.items()}
        if name != OFF:
            added[name] = {role: _spread(_differences(rounds, name, role)) for role in columns}
    return {"us_per_request": per_request, "added_us_per_request": added, "rounds": rounds}


def _differences(rounds: list[dict[str, dict[str, float]]], name: str, role: str) -> list[float]:
    def of(setting: dict[str, float]) -> float:
        return setting[role] if role in setting else sum(setting.values())

    return [of(one[name]) - of(one[OFF]) for one in rounds]


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    found = {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {name: round(value, 1) for name, value in found.items()}


def _told(found: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{name} {sum(one.values()):,.0f} us" for name, one in found.items())


def table(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    lines = []
    for name, found in results["us_per_request"].items():
        lines.append((f"tracing {name}", f"{found['both services']:,.0f} us of CPU a request"))
        for role, added in results["added_us_per_request"].get(name, {}).items():
            base = results["us_per_request"][OFF][role]
            lines.append(
                (
                    f"  {role} adds",
                    f"{added['median']:,.0f} us ({added['median'] / base:+.1%}), quartiles "
                    f"{added['q1']:,.0f} to {added['q3']:,.0f}, all {added['min']:,.0f} to "
                    f"{added['max']:,.0f}",
                )
            )
    for name, spans in results["spans_per_request"].items():
        lines.append((f"spans a request, {name}", f"{spans:.3f}"))
    return lines
