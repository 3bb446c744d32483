"""The spans of one request, made when it has ended from the times the core took down.

Nothing is done per token. It does not know streams.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_service.core.messages import Finish, FinishReason, Submit, Usage
from engine_service.server.core_client import Ended
from tidemill.runtime.errors import ServiceError
from tidemill.runtime.telemetry import Attributes, Span, Tracer, epoch_ns, parse

SPAN = "tidemill.v1.EngineService/Generate"
_POOL_SPAN = "tidemill.v1.EngineService/Pool"
_FAILED = {
    FinishReason.ABORTED: "aborted",
    FinishReason.DEADLINE: "deadline exceeded",
    FinishReason.ERROR: "failed",
}


def trace_request(
    tracer: Tracer, submit: Submit, parent: tuple[str, str], block_length: int
) -> Ended:
    """Opens the request's SERVER span below (traceparent, tracestate); the result closes it."""
    name = SPAN if submit.pool is None else _POOL_SPAN
    span = tracer.start(name, parse(*parent), start_ns=epoch_ns(submit.arrival_ns))
    if not span.recording:
        return _untraced

    def ended(outcome: Finish | ServiceError) -> None:
        attributes: Attributes = {"tidemill.request_id": submit.request_id}
        if isinstance(outcome, ServiceError):
            attributes["error.type"] = outcome.reason
            span.end(attributes=attributes, error=outcome.message)
            return
        _phases(span, outcome)
        error = _FAILED.get(outcome.reason)
        attributes |= _usage(outcome)
        if outcome.usage.denoise_steps:
            attributes["tidemill.blocks"] = _num_blocks(outcome.usage, submit.pinned, block_length)
        span.end(attributes=attributes, error=error)

    return ended


def _untraced(outcome: Finish | ServiceError) -> None:
    """The trace is not recorded."""


def _phases(span: Span, finish: Finish) -> None:
    times = finish.timings
    start = epoch_ns(times.arrival_ns)
    last = "engine.denoise" if finish.usage.denoise_steps else "engine.decode"
    lengths = (
        ("engine.queue", times.queue_ns),
        ("engine.prefill", times.prefill_ns),
        (last, times.decode_ns),
    )
    for name, length in lengths:
        if length or name == "engine.queue":
            span.child(name, start_ns=start).end(end_ns=start + length)
        start += length
    for preempted, resumed in finish.pauses:
        pause = span.child("engine.preempted", start_ns=epoch_ns(preempted))
        pause.end(end_ns=epoch_ns(resumed))


def _num_blocks(usage: Usage, pinned: Iterable[tuple[int, int]], block_length: int) -> int:
    """Blocks from the first token behind the prompt to the last generated one.

    `output_tokens` leaves out what the caller pinned, but pinned tokens push generated ones back;
    those behind the last generated one are given, and nothing was computed for them.
    """
    stop = usage.prompt_tokens + usage.output_tokens
    for position, _ in sorted(pinned):
        stop += position < stop
    return -(-stop // block_length) - usage.prompt_tokens // block_length


def _usage(finish: Finish) -> Attributes:
    usage = finish.usage
    passes = max(1, usage.forward_passes)
    return {
        "gen_ai.response.finish_reasons": finish.reason.name.lower(),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "tidemill.forward_passes": usage.forward_passes,
        "tidemill.denoise_steps": usage.denoise_steps,
        "tidemill.preemptions": usage.preemptions,
        "tidemill.tokens_per_forward": usage.output_tokens / passes,
    }
