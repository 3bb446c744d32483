"""How metrics are made: under one prefix, with the model's name, and looked up once.

It does not know what is counted.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.metrics import MetricWrapperBase

from tidemill.telemetry import semconv

PREFIX = "tidemill_"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
LONG_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
Metric = TypeVar("Metric", bound=MetricWrapperBase)
Exemplar = dict[str, str] | None


class Children(Generic[Metric]):
    """A metric's children by their labels: the library takes a lock and makes texts of the labels
    whenever it is asked for one."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._known: dict[tuple[object, ...], Metric] = {}

    def labels(self, *values: object) -> Metric:
        """The child with these values."""
        child = self._known.get(values)
        if child is None:
            child = self._known[values] = self._metric.labels(*values)
        return child

    def clear(self) -> None:
        """Forgets all children; they would go on saying what they said last."""
        self._known = {}
        self._metric.clear()


class Families:
    """Makes metrics in a registry of their own, those of the process and of Python among them.

    The first label of all is `model_name`; a name with its prefix gets no other.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def counter(self, name: str, doc: str, *labels: str) -> Children[Counter]:
        return Children(Counter(PREFIX + name, doc, _labels(labels), registry=self.registry))

    def bare_counter(self, name: str, doc: str, *labels: str) -> Children[Counter]:
        """A counter of what no model is known of."""
        return Children(Counter(PREFIX + name, doc, labels, registry=self.registry))

    def gauge(self, name: str, doc: str, *labels: str) -> Children[Gauge]:
        return Children(Gauge(PREFIX + name, doc, _labels(labels), registry=self.registry))

    def histogram(
        self, name: str, doc: str, buckets: tuple[float, ...] = SECONDS, *labels: str
    ) -> Children[Histogram]:
        names = _labels(labels)
        made = Histogram(PREFIX + name, doc, names, registry=self.registry, buckets=buckets)
        return Children(made)

    def plain(
        self, name: str, doc: str, buckets: tuple[float, ...], *labels: str
    ) -> Children[Histogram]:
        """A histogram whose name and labels are another convention's."""
        return Children(Histogram(name, doc, labels, registry=self.registry, buckets=buckets))


def _labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    return ("model_name", *labels)


class ServerHistograms:
    """OpenTelemetry's metrics of a server of models and of RPCs, as Prometheus writes their names.

    Both services have them: a frontend counts what its clients wait for, an engine what it does.
    """

    def __init__(self, families: Families) -> None:
        told = ("gen_ai_operation_name", "gen_ai_request_model")
        make = families.plain
        self._duration = make(
            "gen_ai_server_request_duration_seconds",
            "gen_ai.server.request.duration: whole requests.",
            semconv.DURATION_S, *told, "error_type",
        )  # fmt: skip
        self._first = make(
            "gen_ai_server_time_to_first_token_seconds",
            "gen_ai.server.time_to_first_token: from the arrival to the first token.",
            semconv.FIRST_TOKEN_S, *told,
        )  # fmt: skip
        self._per_token = make(
            "gen_ai_server_time_per_output_token_seconds",
            "gen_ai.server.time_per_output_token: (whole - first token) / (tokens - 1).",
            semconv.PER_TOKEN_S, *told,
        )  # fmt: skip
        self.rpc = make(
            "rpc_server_call_duration_seconds",
            "rpc.server.call.duration: RPCs that make tokens or vectors.",
            semconv.RPC_S, "rpc_method", "rpc_response_status_code",
        )  # fmt: skip

    def observe(
        self,
        operation: str,
        model: str,
        *,
        whole_s: float,
        first_s: float | None,
        num_tokens: int,
        error: str = "",
        exemplar: Exemplar = None,
    ) -> None:
        """Counts one request; `first_s` is None where it had no token."""
        self._duration.labels(operation, model, error).observe(whole_s, exemplar)
        if first_s is None:
            return
        self._first.labels(operation, model).observe(first_s, exemplar)
        if num_tokens > 1:
            per_token = (whole_s - first_s) / (num_tokens - 1)
            self._per_token.labels(operation, model).observe(per_token, exemplar)
