"""The histogram of gaps between tokens says what the library's own would say."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from frontend import metrics
from tidemill.telemetry.families import SECONDS

NAME = "inter_token_latency_seconds"


def lines(text: bytes) -> set[str]:
    """Samples of the histogram, without the time of its creation."""
    return {
        line
        for line in text.decode().splitlines()
        if NAME in line and f"{NAME}_created" not in line
    }


def test_gaps_read_as_a_histogram_of_the_library(seed: int) -> None:
    rng = random.Random(seed)
    bounds = [0.001, 0.01, 0.06, 1.0, 10.0]
    gaps = [0.0, *bounds, 11.0, *(rng.expovariate(20) for _ in range(500))]
    ours, registry = metrics.Metrics(), CollectorRegistry()
    theirs = Histogram(
        f"tidemill_{NAME}",
        "Between deliveries of one choice.",
        ("model_name",),
        registry=registry,
        buckets=SECONDS,
    )
    for number, gap in enumerate(gaps):
        model = f"model-{number % 2}"
        ours.inter_token_latency.labels(model).observe(gap)
        theirs.labels(model).observe(gap)
    assert lines(ours.text()[0]) == lines(generate_latest(registry))
    assert len(lines(ours.text()[0])) > 2 * len(bounds)
    theirs.labels("model-0").observe(0.01)
    assert lines(ours.text()[0]) != lines(generate_latest(registry))
