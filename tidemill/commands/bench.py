"""`tidemill bench NAME`: runs one benchmark of tidemill.bench and shows its figures.

A benchmark is a module with a dataclass of options and `run(options)` returning figures; where it
has `table(figures)`, that chooses what is shown. This file does not know what they measure.
"""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import tidemill
from tidemill.commands.spellings import ours
from tidemill.runtime import options

BENCHMARKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "throughput": ("ThroughputOptions", "offline tokens per second, beside transformers"),
        "quality": ("QualityOptions", "exact match per task, and tokens per forward"),
        "stack": ("StackOptions", "the services around a simulated model of fixed step time"),
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
    if name not in BENCHMARKS:
        lines = [f"  {name:<12} {text}" for name, (_, text) in BENCHMARKS.items()]
        print("usage: tidemill bench NAME [--json FILE] [--flag VALUE ...]\n", *lines, sep="\n")
        return 0 if name in ("-h", "--help") else 2
    module = import_module(f"tidemill.bench.{name}")
    kind = getattr(module, BENCHMARKS[name][0])
    chosen, report = options.parse([kind, Report], ours(rest), prog=f"tidemill bench {name}")
    figures = module.run(chosen)
    if hasattr(module, "table"):
        print(*(f"{label:<28} {value}" for label, value in module.table(figures)), sep="\n")
    else:
        print(json.dumps(figures, indent=2))
    if report.json:
        Path(report.json).write_text(json.dumps(_context(name) | figures, indent=2) + "\n")
        print(f"figures in {report.json}", file=sys.stderr)
    return 0


def _context(name: str) -> dict[str, object]:
    return {
        "benchmark": name,
        "tidemill": tidemill.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
