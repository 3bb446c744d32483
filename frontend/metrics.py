"""Every metric of the frontend, named once. It does not know what the numbers mean to a request.

Names mirror those that dashboards of other servers use, under the prefix `tidemill_`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_LONG_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_CHOICES = (1, 2, 5, 10, 20)


class GapCounts:
    """How many gaps fell into each bucket, and their sum in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one gap: the bucket of the least bound that is not below it."""
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum_s += seconds


class Gaps:
    """A histogram that is told of every token, by model.

    The library's own takes an eighth of the time that a token costs here, for locks that one event
    loop does not need; this one makes its samples when they are asked for.
    """

    def __init__(self, name: str, doc: str) -> None:
        self._name = name
        self._doc = doc
        self._models: dict[str, GapCounts] = {}

    def labels(self, model_name: str) -> GapCounts:
        """The counts of a model."""
        return self._models.setdefault(model_name, GapCounts())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What a registry asks for: buckets are cumulative."""
        family = HistogramMetricFamily(self._name, self._doc, labels=["model_name"])
        for model_name, seen in self._models.items():
            bounds = [*map(str, map(float, _SECONDS)), "+Inf"]
            buckets = list(zip(bounds, accumulate(seen.counts), strict=True))
            family.add_metric([model_name], buckets, seen.sum_s)
        yield family


Metric = TypeVar("Metric", bound=MetricWrapperBase)


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


class Metrics:
    """The metrics of one frontend process, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, gauge, seconds = self._counter, self._gauge, self._seconds
        self.request_success = counter(
            "request_success", "Choices that finished, by reason.", "finished_reason"
        )
        self.request_failure = counter("request_failure", "Requests that failed.", "error_type")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.cached_tokens = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens delivered.")
        self.denoise_steps = counter(
            "diffusion_num_denoising_steps", "Denoising steps of finished choices."
        )
        self.forward_passes = counter("forward_passes", "Model steps of finished choices.")
        self.num_preemptions = counter("num_preemptions", "Preemptions of finished choices.")
        self.time_to_first_token = seconds("time_to_first_token_seconds", "Until first text.")
        self.inter_token_latency = Gaps(
            "tidemill_inter_token_latency_seconds", "Between deliveries of one choice."
        )
        self._registry.register(self.inter_token_latency)
        self.time_per_output_token = seconds(
            "request_time_per_output_token_seconds", "(end to end - first) / (tokens - 1)."
        )
        self.e2e_latency = seconds("e2e_request_latency_seconds", "Whole requests.", _LONG_SECONDS)
        self.queue_time = seconds("request_queue_time_seconds", "Waiting in the engine.")
        self.prefill_time = seconds("request_prefill_time_seconds", "Prefill in the engine.")
        self.decode_time = seconds("request_decode_time_seconds", "Decoding.", _LONG_SECONDS)
        self.request_prompt_tokens = seconds(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKENS
        )
        self.request_generation_tokens = seconds(
            "request_generation_tokens", "Tokens delivered per choice.", _TOKENS
        )
        self.request_params_n = seconds("request_params_n", "Choices asked for.", _CHOICES)
        self.num_running = gauge("num_requests_running", "Sequences that run in the engine.")
        self.num_waiting = gauge("num_requests_waiting", "Sequences that wait in the engine.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        self.engine_up = gauge("engine_up", "Engines with an open session.")
        self.http_requests = Children(
            Counter(
                "tidemill_http_requests",
                "HTTP requests by route and status.",
                ("handler", "method", "status"),
                registry=self._registry,
            )
        )

    def add(self, collector: Collector) -> None:
        """Tells what `collector` collects, too."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self._registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Children[Counter]:
        names = ("model_name", *labels)
        return Children(Counter(f"tidemill_{name}", doc, names, registry=self._registry))

    def _gauge(self, name: str, doc: str) -> Children[Gauge]:
        return Children(Gauge(f"tidemill_{name}", doc, ("model_name",), registry=self._registry))

    def _seconds(
        self, name: str, doc: str, buckets: tuple[float, ...] = _SECONDS
    ) -> Children[Histogram]:
        names = ("model_name",)
        return Children(
            Histogram(f"tidemill_{name}", doc, names, registry=self._registry, buckets=buckets)
        )
