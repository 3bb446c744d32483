"""What is measured, traced and logged about one request. It changes nothing about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from frontend.metrics import Metrics
from frontend.request import Chat, Ingress, TextRequest
from tidemill.runtime.errors import DeadlineExceeded, ServiceError
from tidemill.runtime.rpc import is_late
from tidemill.telemetry import semconv
from tidemill.telemetry.context import exemplar
from tidemill.telemetry.semconv import Attributes
from tidemill.telemetry.tracer import Span

if TYPE_CHECKING:
    from frontend.choice import Choice
    from frontend.generation import Generation

_LOG = logging.getLogger("tidemill.frontend.request")
_MAX_USER_CHARS = 128


class Observation:
    """Clocks and counters of one request; nothing is done per token."""

    def __init__(
        self,
        metrics: Metrics,
        model_name: str,
        ingress: Ingress,
        request: TextRequest,
        num_shown: int = 0,
    ) -> None:
        """`num_shown`: characters of each prompt that may be logged."""
        self._metrics = metrics
        self._model_name = model_name
        self._ingress = ingress
        self._request = request
        self._num_shown = num_shown
        self._client_span: Span | None = None
        self._last: dict[int, float] = {}
        self._first: float | None = None
        self._clock = asyncio.get_running_loop().time
        self._exemplar = exemplar(ingress.span.context) if ingress.span.recording else None
        self._between = metrics.inter_token_latency.labels(model_name)

    @property
    def _operation(self) -> str:
        is_chat = bool(self._request.prompts) and isinstance(self._request.prompts[0], Chat)
        return semconv.CHAT if is_chat else semconv.COMPLETION

    def start_client_span(self) -> Span:
        """The CLIENT span that covers the engine's work; its context travels inside Submit."""
        name = f"{self._operation} {self._model_name}"
        self._client_span = self._ingress.span.child(name, kind="CLIENT")
        return self._client_span

    def delivered(self, index: int) -> None:
        """Tokens of a choice have arrived."""
        now = self._clock()
        last = self._last.get(index)
        if self._first is None:
            self._first = now
            ttft = self._metrics.time_to_first_token.labels(self._model_name)
            ttft.observe(now - self._ingress.received, self._exemplar)
        if last is not None:
            self._between.observe(now - last)
        self._last[index] = now

    def ended(self, generation: Generation, failure: BaseException | None) -> None:
        """The one log line, the counters, and the end of the CLIENT span."""
        now, deadline = self._clock(), self._ingress.deadline
        if isinstance(failure, _GONE) and is_late(self._ingress.received, now, deadline):
            failure = DeadlineExceeded("its time was up")  # which gRPC says like this
        outcome = _outcome(generation, failure)
        self._count(generation, failure, now)
        usage = generation.usage
        if self._client_span is not None:
            attributes = self._attributes(generation)
            if failure is not None:
                attributes[semconv.ERROR_TYPE] = error_type(failure)
            self._client_span.end(attributes=attributes, error=None if failure is None else outcome)
        first = None if self._first is None else round(self._first - self._ingress.received, 4)
        context = self._ingress.span.context
        beside = {} if context is None else context.ids
        if user := self._request.options.user:
            beside["user"] = user[:_MAX_USER_CHARS]
        if self._ingress.caller:
            beside["key"] = self._ingress.caller
        if self._num_shown:
            beside["prompts"] = shown_prompts(self._request, self._num_shown)
        _LOG.info(
            "request %s",
            outcome,
            extra={
                "request_id": self._ingress.request_id,
                "call": self._ingress.asked,
                "client": self._ingress.client,
                "model": self._model_name,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.output_tokens,
                "ttft_s": first,
                "e2e_s": round(now - self._ingress.received, 4),
                **beside,
            },
        )

    def _count(self, generation: Generation, failure: BaseException | None, now: float) -> None:
        metrics, name, usage = self._metrics, self._model_name, generation.usage
        for choice in generation.choices:
            if choice.finish is None:
                continue
            metrics.request_success.labels(name, _reason(choice)).inc()
            metrics.request_generation_tokens.labels(name).observe(choice.num_tokens)
            times = choice.timings
            metrics.queue_time.labels(name).observe(times.queue_ns / 1e9)
            metrics.prefill_time.labels(name).observe(times.prefill_ns / 1e9)
            metrics.decode_time.labels(name).observe(times.decode_ns / 1e9)
            inference_ns = times.prefill_ns + times.decode_ns
            metrics.request_inference.labels(name).observe(inference_ns / 1e9)
        metrics.generation_tokens.labels(name).inc(usage.output_tokens)
        metrics.forward_passes.labels(name).inc(usage.forward_passes)
        metrics.denoise_steps.labels(name).inc(usage.denoise_steps)
        metrics.num_preemptions.labels(name).inc(usage.preemptions)
        longest = max((choice.num_tokens for choice in generation.choices), default=0)
        self._count_duration(longest, failure, now)
        if failure is not None:
            metrics.request_failure.labels(name, error_type(failure)).inc()
            return
        if (asked := self._request.options.sampling.max_tokens) is not None:
            metrics.max_tokens.labels(name).observe(asked)
        metrics.prompt_tokens.labels(name).inc(usage.prompt_tokens)
        metrics.cached_tokens.labels(name).inc(usage.cached_tokens)
        metrics.request_prompt_tokens.labels(name).observe(usage.prompt_tokens)
        metrics.request_params_n.labels(name).observe(self._request.options.n)
        metrics.e2e_latency.labels(name).observe(now - self._ingress.received, self._exemplar)
        if self._first is not None and longest > 1:  # choices are made side by side
            per_token = (now - self._first) / (longest - 1)
            metrics.time_per_output_token.labels(name).observe(per_token, self._exemplar)

    def _count_duration(self, num_tokens: int, failure: BaseException | None, now: float) -> None:
        """The histograms of OpenTelemetry's conventions, failed requests among them."""
        received = self._ingress.received
        self._metrics.server.observe(
            self._operation,
            self._model_name,
            whole_s=now - received,
            first_s=None if self._first is None else self._first - received,
            num_tokens=num_tokens,
            error="" if failure is None else error_type(failure),
            exemplar=self._exemplar,
        )

    def _attributes(self, generation: Generation) -> Attributes:
        options, usage = self._request.options, generation.usage
        sampling, ends = options.sampling, [_reason(choice) for choice in generation.choices]
        found: dict[str, str | int | float | bool | tuple[str, ...] | None] = {
            semconv.OPERATION: self._operation,
            semconv.PROVIDER: "tidemill",
            semconv.REQUEST_MODEL: options.model or self._model_name,
            semconv.REQUEST_MAX_TOKENS: sampling.max_tokens,
            semconv.REQUEST_TEMPERATURE: sampling.temperature,
            semconv.REQUEST_TOP_P: sampling.top_p,
            semconv.REQUEST_TOP_K: sampling.top_k,
            semconv.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
            semconv.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
            semconv.REQUEST_STOP: options.stop or None,
            semconv.REQUEST_SEED: sampling.seed,
            semconv.REQUEST_CHOICES: options.n,
            semconv.RESPONSE_ID: self._ingress.request_id,
            semconv.RESPONSE_MODEL: self._model_name,
            semconv.RESPONSE_FINISH: tuple(end for end in ends if end) or None,
            semconv.INPUT_TOKENS: usage.prompt_tokens,
            semconv.OUTPUT_TOKENS: usage.output_tokens,
            semconv.CACHED_TOKENS: usage.cached_tokens,
            semconv.REASONING_TOKENS: usage.reasoning_tokens,
        }
        if self._first is not None:
            found[semconv.RESPONSE_FIRST_CHUNK] = self._first - self._ingress.received
        return {name: value for name, value in found.items() if value is not None}


@contextmanager
def inner_span(ingress: Ingress, name: str) -> Iterator[None]:
    """An INTERNAL span of a request around a block."""
    span = ingress.span.child(name)
    try:
        yield
    except BaseException as failure:
        span.end(
            attributes={semconv.ERROR_TYPE: error_type(failure)},
            error=str(failure) or type(failure).__name__,
        )
        raise
    span.end()


def shown_prompts(request: TextRequest, num_chars: int) -> str:
    """The beginning of each prompt, for operators who asked for it."""
    texts = (one.messages if isinstance(one, Chat) else one for one in request.prompts)
    return " | ".join(str(text)[:num_chars] for text in texts)


def _reason(choice: Choice) -> str:
    """How a choice ended; empty while it has not."""
    if choice.finish is None:
        return ""
    return "stop" if choice.matched else choice.finish.reason.name.lower()


def error_type(failure: BaseException) -> str:
    """What a failure is called in metrics and spans; of few values."""
    if isinstance(failure, ServiceError):
        return failure.reason.lower()
    return "cancelled" if isinstance(failure, _GONE) else type(failure).__name__


def _outcome(generation: Generation, failure: BaseException | None) -> str:
    if isinstance(failure, ServiceError):
        return f"failed: {failure.message}"
    if failure is not None:
        return "aborted" if isinstance(failure, _GONE) else f"failed: {failure!r}"
    is_done = all(choice.finish is not None for choice in generation.choices)
    return "finished" if is_done else "aborted"


_GONE = (asyncio.CancelledError, GeneratorExit)
