"""Every metric of the frontend, named once. It does not know what the numbers mean to a request.

Names mirror those that dashboards of other servers use, under the prefix `tidemill_`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from tidemill.telemetry.exposition import Alias, expose
from tidemill.telemetry.families import (
    LONG_SECONDS,
    SECONDS,
    TOKENS,
    Families,
    ServerHistograms,
)

_CHOICES = (1, 2, 5, 10, 20)


class GapCounts:
    """How many gaps fell into each bucket, and their sum in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one gap: the bucket of the least bound that is not below it."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
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
            bounds = [*map(str, map(float, SECONDS)), "+Inf"]
            buckets = list(zip(bounds, accumulate(seen.counts), strict=True))
            family.add_metric([model_name], buckets, seen.sum_s)
        yield family


class HttpCounts:
    """What is counted of every HTTP request."""

    def __init__(self, families: Families) -> None:
        labels = ("handler", "method")
        self.requests = families.bare_counter(
            "http_requests", "HTTP requests by route and status.", *labels, "status"
        )
        self.duration = families.plain(
            "tidemill_http_request_duration_seconds",
            "HTTP requests by route, streams to their end.",
            LONG_SECONDS,
            *labels,
        )


class Metrics:
    """The metrics of one frontend process, in a registry of their own."""

    def __init__(self) -> None:
        self._families = families = Families()
        counter, gauge, seconds = families.counter, families.gauge, families.histogram
        self.server = ServerHistograms(families)
        self.rpc_duration = self.server.rpc
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
        families.registry.register(self.inter_token_latency)
        self.time_per_output_token = seconds(
            "request_time_per_output_token_seconds", "(end to end - first) / (tokens - 1)."
        )
        self.e2e_latency = seconds("e2e_request_latency_seconds", "Whole requests.", LONG_SECONDS)
        self.queue_time = seconds("request_queue_time_seconds", "Waiting in the engine.")
        self.prefill_time = seconds("request_prefill_time_seconds", "Prefill in the engine.")
        self.decode_time = seconds("request_decode_time_seconds", "Decoding.", LONG_SECONDS)
        self.request_prompt_tokens = seconds(
            "request_prompt_tokens", "Prompt tokens per request.", TOKENS
        )
        self.request_generation_tokens = seconds(
            "request_generation_tokens", "Tokens delivered per choice.", TOKENS
        )
        self.request_params_n = seconds("request_params_n", "Choices asked for.", _CHOICES)
        self.request_inference = seconds(
            "request_inference_time_seconds", "Prefill and decoding.", LONG_SECONDS
        )
        self.max_tokens = seconds("request_params_max_tokens", "Output tokens asked for.", TOKENS)
        self.num_running = gauge("num_requests_running", "Sequences that run in the engine.")
        self.num_waiting = gauge("num_requests_waiting", "Sequences that wait in the engine.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        self.engine_up = gauge("engine_up", "Engines with an open session.")
        self.http = HttpCounts(families)

    def add(self, collector: Collector) -> None:
        """Tells what `collector` collects, too."""
        self._families.registry.register(collector)

    def text(self, accept: str = "", alias: Alias = "none") -> tuple[bytes, str]:
        """The page for Prometheus, in the format that `accept` asks for, and its content type."""
        return expose(self._families.registry, accept, alias)
