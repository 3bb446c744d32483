"""The figures of a run as lines for a terminal. It does not know how they were measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TIMES = {
    "first token ms (TTFT)": "ttft_ms",
    "per token ms (TPOT)": "tpot_ms",
    "between chunks ms (ITL)": "itl_ms",
    "whole request ms": "e2e_ms",
    "generator late ms": "lag_ms",
}
_COLUMNS = [
    "begun/s",
    "answered/s",
    "good/s",
    "refused",
    "tok/s",
    "TTFT-p50",
    "p99",
    "TPOT-p50",
    "p99",
]
_WIDTH = 11


def table(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Every point, and all of them side by side where there are several."""
    points = results["points"]
    lines = [line for point in points for line in _point(point, results["load"])]
    if len(points) > 1:
        lines.append((results["load"], "".join(f"{name:>{_WIDTH}}" for name in _COLUMNS)))
        lines += [(f"{point['load']:>12g}", _row(point)) for point in points]
    return lines


def _point(point: dict[str, Any], unit: str) -> Iterator[tuple[str, str]]:
    yield (
        f"{point['load']:g} {unit}",
        f"{point['requests']} begun ({point['begun_per_s']:,.2f}/s), {point['ok']} ok; "
        f"{point['answered_per_s']:,.2f} answered/s",
    )
    yield (
        "  tokens/s",
        f"{point['output_tokens_per_s']:,.0f} out, {point['input_tokens_per_s']:,.0f} in; "
        f"{point['tokens_per_chunk']:.2f} a chunk",
    )
    for label, name in _TIMES.items():
        yield f"  {label}", _listed(point[name])
    if "goodput_per_s" in point:
        yield "  goodput", f"{point['goodput_per_s']:,.2f}/s, {point['good_share']:.1%} of all"
    for status, failed in point["failures"].items():
        yield f"  failed: {status}", f"{failed['requests']} ({failed['said']})"
    if point["refused"]["requests"]:
        yield "  refused after ms", _listed(point["refused"]["ms"])
    if point["moved"]:
        yield "  moved to another address", str(point["moved"])


def _listed(percentiles: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.1f}" for name, value in percentiles.items()) or "none"


def _row(point: dict[str, Any]) -> str:
    ttft, tpot = point["ttft_ms"], point["tpot_ms"]
    cells = (
        point["begun_per_s"],
        point["answered_per_s"],
        point.get("goodput_per_s"),
        point["refused"]["requests"],
        point["output_tokens_per_s"],
        ttft.get("p50"),
        ttft.get("p99"),
        tpot.get("p50"),
        tpot.get("p99"),
    )
    return "".join(f"{'' if cell is None else f'{cell:,.1f}':>{_WIDTH}}" for cell in cells)
