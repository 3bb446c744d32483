"""Every metric of the engine, named once, and what a request's end means to them.

Requests are counted when they end; everything else is read when somebody asks. It does not know
HTTP. Names mirror those that dashboards of other servers use, under the prefix `tidemill_`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from engine_service.core.facts import EngineFacts
from engine_service.core.messages import STEP_BOUNDS, Finish, FinishReason, Load, Submit, Tally
from engine_service.server.request_trace import method_of, status_of
from engine_service.server.state import EngineState, Snapshot
from engine_service.server.transfer_counts import TransferCounts
from tidemill import __version__
from tidemill.runtime.errors import EngineDead, InternalError, ServiceError
from tidemill.telemetry import semconv
from tidemill.telemetry.context import TraceContext, exemplar
from tidemill.telemetry.families import LONG_SECONDS, PREFIX, TOKENS, Families, ServerHistograms

_ERRORS = {
    FinishReason.ABORTED: "cancelled",
    FinishReason.DEADLINE: "deadline_exceeded",
    FinishReason.DEAD_END: "dead_end",
}
DRAIN_TIMEOUT = "DRAIN_TIMEOUT"
"""Why requests end that still ran when the time to drain was over."""


class Reading(NamedTuple):
    """What the engine is at the moment of a scrape."""

    snapshot: Snapshot
    tally: Tally
    facts: EngineFacts | None
    silence_ms: int
    sessions: int
    uptime_s: float


class EngineMetrics:
    """The metrics of one engine process, in a registry of their own."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        """`read` is called from the thread that is asked for metrics."""
        self._read = read
        families = Families()
        self.registry = families.registry
        self.registry.register(self)
        self._server = ServerHistograms(families)
        self.transfers = TransferCounts(families)
        counter, seconds = families.counter, families.histogram
        self._success = counter("request_success", "Sequences that finished.", "finished_reason")
        self._failure = counter("request_failure", "Sequences that failed.", "error_type")
        self._rejections = counter("admission_rejections", "Refused before any work.", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of ended sequences.")
        self._generated = counter("generation_tokens", "Output tokens of ended sequences.")
        self._passes = counter("forward_passes", "Model steps of ended sequences.")
        self._first = seconds("time_to_first_token_seconds", "Until the first token.")
        self._per_token = seconds(
            "request_time_per_output_token_seconds", "(whole - first token) / (tokens - 1)."
        )
        self._whole = seconds("e2e_request_latency_seconds", "Whole sequences.", LONG_SECONDS)
        self._queue = seconds("request_queue_time_seconds", "Waiting for a row.")
        self._prefill = seconds("request_prefill_time_seconds", "From the row to the first token.")
        self._decode = seconds(
            "request_decode_time_seconds", "From the first token to the last.", LONG_SECONDS
        )
        self._inference = seconds(
            "request_inference_time_seconds", "From the row to the last token.", LONG_SECONDS
        )
        self._prompt_sizes = seconds("request_prompt_tokens", "Prompt tokens.", TOKENS)
        self._output_sizes = seconds("request_generation_tokens", "Output tokens.", TOKENS)
        self._max_tokens = seconds("request_params_max_tokens", "Output tokens asked for.", TOKENS)

    def rejected(self, model: str, error: ServiceError) -> None:
        """A sequence was refused before it reached the core."""
        self._rejections.labels(model, error.reason.lower()).inc()
        self._failure.labels(model, error.reason.lower()).inc()

    def ended(
        self,
        model: str,
        submit: Submit,
        outcome: Finish | ServiceError,
        context: TraceContext | None,
    ) -> None:
        """Counts a sequence that the core has ended."""
        whole_s = (time.monotonic_ns() - submit.arrival_ns) / 1e9
        rpc = self._server.rpc.labels(method_of(submit), status_of(outcome))
        rpc.observe(whole_s, exemplar(context))
        if isinstance(outcome, ServiceError):
            if isinstance(outcome, EngineDead | InternalError) or outcome.reason == DRAIN_TIMEOUT:
                self._failure.labels(model, outcome.reason.lower()).inc()
            else:
                self.rejected(model, outcome)
            return
        error = _ERRORS.get(outcome.reason, "")
        if error or outcome.reason is FinishReason.ERROR:
            self._failure.labels(model, error or "error").inc()
        self._success.labels(model, outcome.reason.name.lower()).inc()
        self._count(model, submit, outcome)
        self._time(model, submit, outcome, error, context)

    def _count(self, model: str, submit: Submit, finish: Finish) -> None:
        usage = finish.usage
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._generated.labels(model).inc(usage.output_tokens)
        self._passes.labels(model).inc(usage.forward_passes)
        self._prompt_sizes.labels(model).observe(usage.prompt_tokens)
        if submit.pool is None:
            self._output_sizes.labels(model).observe(usage.output_tokens)
            if submit.sampling.max_tokens is not None:
                self._max_tokens.labels(model).observe(submit.sampling.max_tokens)

    def _time(
        self,
        model: str,
        submit: Submit,
        finish: Finish,
        error: str,
        context: TraceContext | None,
    ) -> None:
        times, seen = finish.timings, exemplar(context)
        queue, prefill, decode = (
            ns / 1e9 for ns in (times.queue_ns, times.prefill_ns, times.decode_ns)
        )
        whole, num_tokens = queue + prefill + decode, finish.usage.output_tokens
        self._queue.labels(model).observe(queue, seen)
        self._prefill.labels(model).observe(prefill, seen)
        self._decode.labels(model).observe(decode, seen)
        self._inference.labels(model).observe(prefill + decode, seen)
        self._whole.labels(model).observe(whole, seen)
        operation = semconv.COMPLETION if submit.pool is None else semconv.EMBEDDINGS
        first = queue + prefill if num_tokens else None
        if first is not None:
            self._first.labels(model).observe(first, seen)
            if num_tokens > 1:
                self._per_token.labels(model).observe(decode / (num_tokens - 1), seen)
        self._server.observe(
            operation, model, whole_s=whole, first_s=first, num_tokens=num_tokens, error=error,
            exemplar=seen,
        )  # fmt: skip

    # ------------------------------------------------------------ of the moment

    def collect(self) -> Iterator[Metric]:
        """What a registry asks for."""
        reading = self._read()
        model = "" if reading.facts is None else reading.facts.model_id
        yield _states(reading.snapshot.state, model)
        load = reading.snapshot.load
        for name, doc, value in (
            ("num_requests_running", "Sequences that hold a row.", load.running),
            ("num_requests_waiting", "Sequences that wait for a row.", load.waiting),
            ("num_waiting_tokens", "Tokens that wait to be computed.", load.waiting_tokens),
            ("kv_cache_usage_perc", "KV pages in use, 0 to 1.", _share(load)),
            ("engine_ready", "1 while new work should be sent here.", reading.snapshot.is_ready),
            ("engine_silence_seconds", "Since the core's last word.", reading.silence_ms / 1e3),
            ("engine_sessions", "Open sessions of frontends.", reading.sessions),
            ("engine_uptime_seconds", "Since the start of the server.", reading.uptime_s),
            ("device_memory_used_bytes", "In use on the device.", reading.tally.memory.used),
            ("device_memory_total_bytes", "0 where unknown.", reading.tally.memory.total),
            ("device_memory_peak_bytes", "Most in use at once.", reading.tally.memory.peak),
            ("kv_cache_bytes", "The pool of KV pages.", reading.tally.memory.kv),
            ("queue_capacity", "Sequences that may wait.", _capacity(reading.facts)),
        ):
            yield _gauge(name, doc, model, float(value))
        yield from _tallied(reading.tally, reading.snapshot, model)
        if reading.facts is not None:
            yield from _told_of(reading.facts)


def _share(load: Load) -> float:
    return load.pages_used / max(1, load.pages_total)


def _capacity(facts: EngineFacts | None) -> int:
    return 0 if facts is None else facts.max_queued_requests


def _gauge(name: str, doc: str, model: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, doc, labels=["model_name"])
    family.add_metric([model], value)
    return family


def _states(state: EngineState, model: str) -> GaugeMetricFamily:
    """One series a state, of which one is 1."""
    doc = "1 for the state that the engine is in."
    family = GaugeMetricFamily(PREFIX + "engine_state", doc, labels=["model_name", "state"])
    for one in EngineState:
        family.add_metric([model, one.name.lower()], float(one is state))
    return family


def _tallied(tally: Tally, snapshot: Snapshot, model: str) -> Iterator[Metric]:
    for name, doc, value in (
        ("num_preemptions", "Sequences that lost their row to another.", tally.num_preemptions),
        ("prefix_cache_queries", "Tokens looked up in the cache.", tally.prefix_queries),
        ("prefix_cache_hits", "Tokens found in the cache.", tally.prefix_hits),
        ("diffusion_num_denoising_steps", "Steps of diffusion rows.", tally.denoise_steps),
        ("diffusion_num_canvas_positions", "Positions decided in them.", tally.canvas_positions),
        ("diffusion_num_committed_tokens", "Tokens made final by them.", tally.committed),
        ("engine_steps", "Steps of the core.", snapshot.load.steps),
        ("engine_host_seconds", "CPU time of the core beside steps.", snapshot.load.host_ns / 1e9),
    ):
        counter = CounterMetricFamily(PREFIX + name, doc, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter
    for name, doc, counts, total in (
        ("iteration_tokens", "Query tokens of a step.", tally.token_counts, tally.num_tokens),
        ("iteration_rows", "Rows of a step.", tally.row_counts, tally.num_rows),
    ):
        family = HistogramMetricFamily(PREFIX + name, doc, labels=["model_name"])
        bounds = [*map(str, map(float, STEP_BOUNDS)), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric([model], buckets, total)
        yield family


def _told_of(facts: EngineFacts) -> Iterator[Metric]:
    """Facts as labels of a 1, as routers look for them."""
    cache = {
        "page_size": facts.page_size,
        "num_pages": facts.num_pages,
        "prefix_caching": str(facts.prefix_caching).lower(),
    }
    model = {
        "architecture": facts.architecture,
        "device": facts.device,
        "dtype": facts.dtype,
        "method": facts.default_method,
        "version": __version__,
    }
    for name, doc, labels in (
        ("cache_config", "The pool of KV pages.", cache),
        ("model", "What is served, and where.", model),
    ):
        named = {"model_name": facts.model_id} | {k: str(v) for k, v in labels.items()}
        family = GaugeMetricFamily(f"{PREFIX}{name}_info", doc, labels=list(named))
        family.add_metric(list(named.values()), 1.0)
        yield family
