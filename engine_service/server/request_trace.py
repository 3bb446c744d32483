"""The spans of one request, made when it has ended from the times the core took down.

Nothing is done per token. It does not know streams.
"""

from __future__ import annotations

import logging

from engine_service.core.messages import Finish, FinishReason, Mark, Submit
from engine_service.server.core_client import Ended
from tidemill.runtime.errors import ServiceError
from tidemill.telemetry import semconv
from tidemill.telemetry.semconv import Attributes
from tidemill.telemetry.tracer import Span

SPAN = "tidemill.v1.EngineService/Generate"
POOL_SPAN = "tidemill.v1.EngineService/Pool"
BLOCKS_LEVEL = 3
"""From this trace level on every block of a diffusion request has a span."""
_FAILED = {
    FinishReason.ABORTED: ("aborted", "CANCELLED"),
    FinishReason.DEADLINE: ("deadline exceeded", "DEADLINE_EXCEEDED"),
    FinishReason.ERROR: ("failed", "INTERNAL"),
    FinishReason.DEAD_END: ("dead end", "INVALID_ARGUMENT"),
}
_LOG = logging.getLogger("tidemill.engine.request")


def trace_request(span: Span, submit: Submit, level: int) -> Ended:
    """What is to be told of the request's end: that closes its recorded SERVER span."""

    def ended(outcome: Finish | ServiceError) -> None:
        attributes: Attributes = {"tidemill.request_id": submit.request_id}
        attributes |= _call(method_of(submit), status_of(outcome))
        if isinstance(outcome, ServiceError):
            attributes[semconv.ERROR_TYPE] = outcome.reason
            span.end(attributes=attributes, error=outcome.message)
        else:
            _phases(span, outcome, level)
            error, status = _FAILED.get(outcome.reason, (None, "OK"))
            attributes |= _usage(outcome)
            if error is not None:
                attributes[semconv.ERROR_TYPE] = status
            if outcome.usage.denoise_steps:
                attributes["tidemill.blocks"] = outcome.num_blocks
                attributes["tidemill.remasks"] = outcome.remasks
                attributes["tidemill.cache_refreshes"] = outcome.cache_refreshes
            span.end(attributes=attributes, error=error)
        _tell(span, submit, outcome)

    return ended


def trace_refusal(span: Span, method: str, error: ServiceError) -> None:
    """Ends the SERVER span of what was refused before it was a sequence."""
    attributes = _call(method, status_of(error)) | {semconv.ERROR_TYPE: error.reason}
    span.end(attributes=attributes, error=error.message)


def method_of(submit: Submit) -> str:
    """The RPC that a sequence stands for, however it came."""
    return SPAN if submit.pool is None else POOL_SPAN


def status_of(outcome: Finish | ServiceError) -> str:
    """How that RPC ended."""
    if isinstance(outcome, ServiceError):
        return semconv.status_name(outcome.grpc_code)
    return _FAILED.get(outcome.reason, (None, "OK"))[1]


def _call(method: str, status: str) -> Attributes:
    return {
        semconv.RPC_SYSTEM: "grpc",
        semconv.RPC_METHOD: method,
        semconv.RPC_STATUS: status,
    }


def _tell(span: Span, submit: Submit, outcome: Finish | ServiceError) -> None:
    """A line that leads from the log to the trace."""
    reason = outcome.reason if isinstance(outcome, ServiceError) else outcome.reason.name
    ids = span.context.ids if span.context else {}
    extra = {"request_id": submit.request_id, **ids}
    _LOG.debug("request ended: %s", reason.lower(), extra=extra)


def _phases(span: Span, finish: Finish, level: int) -> None:
    times = finish.timings
    started = times.arrival_ns + times.queue_ns
    stop = started + times.prefill_ns + times.decode_ns
    decoding = _decoding_since(finish, started)
    last = "engine.denoise" if finish.usage.denoise_steps else "engine.decode"
    span.child("engine.queue", start_ns=times.arrival_ns).end(end_ns=started)
    if decoding > started:
        prefill = span.child("engine.prefill", start_ns=started)
        for mark in finish.marks:
            if not mark.is_block and mark.at_ns <= decoding:
                prefill.event("chunk", mark.at_ns, {"tidemill.tokens": mark.num_tokens})
        prefill.end(end_ns=decoding)
    if stop > decoding:
        phase = span.child(last, start_ns=decoding)
        _blocks(phase, [mark for mark in finish.marks if mark.is_block], decoding, level)
        phase.end(end_ns=stop)
    for preempted, resumed in finish.pauses:
        span.child("engine.preempted", start_ns=preempted).end(end_ns=resumed)


def _decoding_since(finish: Finish, started: int) -> int:
    """When the prompt was done: with the first token, but a first block takes time of its own."""
    times, marks = finish.timings, finish.marks
    first = next((i for i, mark in enumerate(marks) if mark.is_block), None)
    if first is None:
        return started + times.prefill_ns
    return marks[first - 1].at_ns if first else started


def _blocks(phase: Span, blocks: list[Mark], start: int, level: int) -> None:
    steps = 0
    for block in blocks:
        facts: Attributes = {
            "tidemill.tokens": block.num_tokens,
            "tidemill.denoise_steps": block.denoise_steps - steps,
        }
        if level >= BLOCKS_LEVEL:
            child = phase.child("engine.block", start_ns=start)
            child.end(attributes=facts, end_ns=block.at_ns)
        else:
            phase.event("block", block.at_ns, facts)
        start, steps = block.at_ns, block.denoise_steps


def _usage(finish: Finish) -> Attributes:
    usage = finish.usage
    passes = max(1, usage.forward_passes)
    return {
        semconv.RESPONSE_FINISH: (finish.reason.name.lower(),),
        semconv.INPUT_TOKENS: usage.prompt_tokens,
        semconv.OUTPUT_TOKENS: usage.output_tokens,
        semconv.CACHED_TOKENS: usage.cached_tokens,
        "tidemill.forward_passes": usage.forward_passes,
        "tidemill.denoise_steps": usage.denoise_steps,
        "tidemill.preemptions": usage.preemptions,
        "tidemill.tokens_per_forward": usage.output_tokens / passes,
    }
