"""The metrics of each engine, made when they are asked for. It does not know what they mean.

The label `engine` is the address; sums over all engines stand in frontend/metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend.fleet.fleet import Fleet
from frontend.fleet.member import Member

_GAUGES: dict[str, tuple[str, Callable[[Member], float]]] = {
    "up": ("1 while it takes requests.", lambda one: one.state in ("ready", "paused")),
    "requests_running": ("Sequences that run there.", lambda one: one.client.load.running),
    "requests_waiting": ("Sequences that wait there.", lambda one: one.client.load.waiting),
    "waiting_tokens": ("Tokens that wait there.", lambda one: one.client.load.waiting_tokens),
    "kv_cache_usage_perc": (
        "Share of its KV pages in use, 0 to 1.",
        lambda one: one.client.load.pages_used / max(1, one.client.load.pages_total),
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[Member], float]]] = {
    "requests_routed": ("Requests sent there.", lambda one: one.num_routed),
    "retries": (
        "Requests that failed there without a token and went elsewhere.",
        lambda one: one.num_retried,
    ),
    "ejections": ("Times it got no requests for a while.", lambda one: one.outlier.num_ejections),
}


class FleetMetrics(Collector):
    """For a registry; every engine is a line of each metric."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """What a registry asks for."""
        members = self._fleet.members
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (doc, value) in table.items():
                family = kind(f"tidemill_fleet_{name}", doc, labels=["engine"])
                for one in members:
                    family.add_metric([one.client.address], float(value(one)))
                yield family
