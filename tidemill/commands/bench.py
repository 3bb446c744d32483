"""`tidemill bench NAME`: runs one benchmark of tidemill.bench and shows its figures.

A benchmark is a module with a dataclass of options and `run(options)`, or `run(options, config)`,
returning figures; where it has `table(figures)`, that chooses what is shown, and where
`check(figures)`, that raises where they are worth nothing. This file does not know what they
measure.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from engine_service.config import EngineConfig
from tidemill.bench.bounds import check_bounds
from tidemill.bench.context import context
from tidemill.bench.early import EndedEarly
from tidemill.bench.engines import NOT_MEASURED, NOT_SERVED
from tidemill.bench.places import check_place
from tidemill.commands.foreign_flags import BENCH_ADVICE
from tidemill.commands.pipes import unread_progress
from tidemill.commands.spellings import SPELLINGS
from tidemill.interrupts import ended_by_signals
from tidemill.runtime import options


class Benchmark(NamedTuple):
    """The dataclass of its flags in tidemill.bench.<name>, what it measures, and whether `run`
    takes an EngineConfig beside them, of which some fields are not to be chosen."""

    options: str
    text: str
    takes_engine: bool = True
    hidden: frozenset[str] = NOT_MEASURED


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "throughput": Benchmark(
            "ThroughputOptions", "offline tokens per second of request sets, or beside transformers"
        ),
        "latency": Benchmark("LatencyOptions", "time to first token and between tokens"),
        "batching": Benchmark("BatchingOptions", "continuous over static batching; how full KV is"),
        "step": Benchmark("StepOptions", "host and device time of one step, phase by phase"),
        "kernels": Benchmark(
            "KernelsOptions", "every kernel against PyTorch eager and the device", False
        ),
        "quality": Benchmark(
            "QualityOptions", "exact match per task, and tokens per forward", False
        ),
        "online": Benchmark(
            "OnlineOptions", "throughput of HTTP streams beside the same requests offline"
        ),
        "serve": Benchmark(
            "ServeOptions",
            "load on a running server: latencies, throughput, goodput",
            hidden=NOT_SERVED,
        ),
        "tracing": Benchmark(
            "TracingOptions", "CPU per request with tracing off, sampled, always", False
        ),
        "stack": Benchmark(
            "StackOptions", "the services around a simulated model of fixed step time", False
        ),
        "frontend": Benchmark(
            "FrontendOptions", "chats and streams that a frontend carries, and what it adds", False
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What every benchmark takes."""

    json: str | None = None
    """File for the results."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first word names; `--json FILE` keeps its figures."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in BENCHMARKS:
        near = get_close_matches(name, BENCHMARKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"tidemill bench: unknown benchmark {name!r}{hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    module, benchmark = import_module(f"tidemill.bench.{name}"), BENCHMARKS[name]
    kinds = [getattr(module, benchmark.options), Report]
    hidden: frozenset[str] = frozenset()
    if benchmark.takes_engine:
        kinds, hidden = [*kinds, EngineConfig], benchmark.hidden
    prog = f"tidemill bench {name}"
    chosen, report, *engine = options.parse(
        kinds, rest, prog=prog, hidden=hidden, advice=BENCH_ADVICE, spellings=SPELLINGS
    )
    check_bounds(chosen)
    if report.json:
        check_place(Path(report.json), "json")
    with unread_progress() if report.json else nullcontext():
        figures, cause = _measure(module, chosen, *engine)
        if report.json:  # whoever reads what follows may have left
            Path(report.json).write_text(json.dumps(context(name) | figures, indent=2) + "\n")
            print(f"figures in {report.json}", file=sys.stderr)
    if hasattr(module, "table"):
        print(*(f"{label:<28} {value}" for label, value in module.table(figures)), sep="\n")
    else:
        print(json.dumps(figures, indent=2))
    if cause is not None:
        raise cause
    if hasattr(module, "check"):
        module.check(figures)
    return 0


def _usage() -> str:
    lines = [f"  {name:<12} {one.text}" for name, one in BENCHMARKS.items()]
    return "\n".join(["usage: tidemill bench NAME [--json FILE] [--flag VALUE ...]\n", *lines])


def _measure(module: ModuleType, *chosen: Any) -> tuple[dict[str, Any], BaseException | None]:
    """The figures, and what ended the run ahead of the last of them."""
    try:
        with ended_by_signals():
            return module.run(*chosen), None
    except EndedEarly as early:
        return early.figures, early.__cause__
