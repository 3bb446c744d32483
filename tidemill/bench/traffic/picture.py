"""A picture of a run: latency and throughput over load. It does not know how they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tidemill.runtime.errors import Unsupported

_INCHES = (9.0, 6.4)
_DPI = 90
_MARKED = {"marker": "o", "markersize": 3.5, "linewidth": 1.2}


def check_drawable() -> None:
    """Raises Unsupported where matplotlib is not installed."""
    try:
        import_module("matplotlib")
    except ImportError:
        raise Unsupported(
            "--plot needs matplotlib; install it with: pip install 'tidemill[plot]'", param="plot"
        ) from None


def draw(points: Sequence[dict[str, Any]], load_label: str, path: str) -> None:
    """Writes a PNG with one mark per point. `load_label` says what `load` of a point is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots(2, 2)
    load = [point["load"] for point in points]
    for axis, name, label in (
        (axes[0, 0], "ttft_ms", "time to first token, ms"),
        (axes[0, 1], "tpot_ms", "time per output token, ms"),
    ):
        for percentile in ("p50", "p95", "p99"):
            seen = [point[name].get(percentile, float("nan")) for point in points]
            axis.plot(load, seen, label=percentile, **_MARKED)
        axis.set_ylabel(label)
    rates = {"begun": "begun_per_s", "answered": "answered_per_s", "good": "goodput_per_s"}
    for name, key in rates.items():
        if all(key in point for point in points):
            axes[1, 0].plot(load, [point[key] for point in points], label=name, **_MARKED)
    refused = [point["refused"]["requests"] / point["seconds"] for point in points]
    axes[1, 0].plot(load, refused, label="refused", **_MARKED)
    axes[1, 0].set_ylabel("requests per second")
    axes[1, 1].plot(load, [p["output_tokens_per_s"] for p in points], label="out", **_MARKED)
    axes[1, 1].set_ylabel("tokens per second")
    for axis in axes.flat:
        axis.set_xlabel(load_label)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, format="png", metadata={"Software": None})
