"""Percentiles, each a value that was seen (nearest rank). It does not know what was measured."""

from __future__ import annotations

from collections.abc import Sequence

FEW = (50, 90, 99)
PERCENTS = (50, 90, 95, 99)


def nearest_rank(values: Sequence[float], percents: Sequence[int]) -> list[float]:
    """For each P in 1..100 the least of the values (at least one) that P percent do not exceed."""
    ordered = sorted(values)
    return [ordered[-(-percent * len(ordered) // 100) - 1] for percent in percents]


def percentiles_ms(seconds: Sequence[float], percents: Sequence[int] = FEW) -> dict[str, float]:
    """p50, p90 and so on, in milliseconds; empty for no values."""
    if not seconds:
        return {}
    found = zip(percents, nearest_rank(seconds, percents), strict=True)
    return {f"p{percent}": round(1e3 * value, 3) for percent, value in found}
