"""The spans of one request, made when it has ended from the times the core took down, but for that
of a transfer, which another engine has to know.

Nothing is done per token. It does not know streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine_service.core.messages import Finish, FinishReason, Mark, Submit
from engine_service.server.transfer_counts import Transfer
from tidemill.runtime.errors import ServiceError
from tidemill.telemetry import semconv
from tidemill.telemetry.semconv import Attributes
from tidemill.telemetry.tracer import Span

SPAN = "tidemill.v1.EngineService/Generate"
POOL_SPAN = "tidemill.v1.EngineService/Pool"
TRANSFER_SPAN = "tidemill.v1.KvTransferService/Transfer"
BLOCKS_LEVEL = 3
"""From this trace level on every block of a diffusion request has a span."""
_FAILED = {
    FinishReason.ABORTED: ("aborted", "CANCELLED"),
    FinishReason.DEADLINE: ("deadline exceeded", "DEADLINE_EXCEEDED"),
    FinishReason.ERROR: ("failed", "INTERNAL"),
    FinishReason.DEAD_END: ("dead end", "INVALID_ARGUMENT"),
}
_LOG = logging.getLogger("tidemill.engine.request")


class RequestTrace:
    """The recorded `span` of a sequence, and what lies below it."""

    def __init__(self, span: Span, submit: Submit, level: int) -> None:
        self.span = span
        self._submit = submit
        self._level = level
        self._queued_ns = submit.arrival_ns
        self._transfer: Span | None = None

    def fetches(self) -> tuple[str, str]:
        """Its KV is asked for in its name: (traceparent, tracestate) of that."""
        start_ns = self._submit.arrival_ns
        self._transfer = self.span.child("engine.transfer", kind="CLIENT", start_ns=start_ns)
        context = self._transfer.context
        assert context is not None, "it is recorded"
        return context.traceparent, context.state

    def fetched(self, peer: str, moved: Transfer, error: str | None) -> None:
        """It waits no longer for its KV, which may have been asked for in another's name."""
        start_ns, self._queued_ns = self._submit.arrival_ns, time.monotonic_ns()
        attributes = _moved(peer, moved)
        if span := self._transfer:
            attributes |= {semconv.RPC_SYSTEM: "grpc", semconv.RPC_METHOD: TRANSFER_SPAN}
        else:
            span = self.span.child("engine.transfer", start_ns=start_ns)
        self._transfer = None
        span.end(attributes=attributes, error=error, end_ns=self._queued_ns)

    def ended(self, outcome: Finish | ServiceError) -> None:
        """Closes the span, with what ended it."""
        submit, span = self._submit, self.span
        attributes: Attributes = {"tidemill.request_id": submit.request_id}
        if not submit.only_prefills:
            attributes |= _call(method_of(submit), status_of(outcome))
        if self._transfer is not None:
            self._transfer.end(error="the request has ended")
        if isinstance(outcome, ServiceError):
            attributes[semconv.ERROR_TYPE] = outcome.reason
            span.end(attributes=attributes, error=outcome.message)
        else:
            _phases(span, outcome, self._level, self._queued_ns)
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


@contextmanager
def trace_sending(span: Span, peer: str, moved: Transfer) -> Iterator[None]:
    """Around a transfer to another engine: closes its SERVER span."""
    status, error = "OK", None
    try:
        yield
    except BaseException as failure:
        is_cancelled = isinstance(failure, asyncio.CancelledError)
        status = "CANCELLED" if is_cancelled else "INTERNAL"
        status = status_of(failure) if isinstance(failure, ServiceError) else status
        error = str(failure) or status.lower()
        raise
    finally:
        attributes = _call(TRANSFER_SPAN, status) | _moved(peer, moved)
        if error is not None:
            attributes[semconv.ERROR_TYPE] = status
        span.end(attributes=attributes, error=error)


def _moved(peer: str, moved: Transfer) -> Attributes:
    return {
        "tidemill.peer": peer,
        "tidemill.outcome": moved.outcome,
        "tidemill.tokens": moved.num_tokens,
        "tidemill.bytes": moved.num_bytes,
    }


def trace_refusal(span: Span, method: str, error: ServiceError) -> None:
    """Ends the SERVER span of what was refused before it was a sequence."""
    attributes = _call(method, status_of(error)) | {semconv.ERROR_TYPE: error.reason}
    span.end(attributes=attributes, error=error.message)


def method_of(submit: Submit) -> str:
    """The RPC that a sequence stands for, however it came."""
    if submit.only_prefills:
        return TRANSFER_SPAN
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


def _phases(span: Span, finish: Finish, level: int, queued_ns: int) -> None:
    times = finish.timings
    started = times.arrival_ns + times.queue_ns
    stop = started + times.prefill_ns + times.decode_ns
    decoding = _decoding_since(finish, started)
    last = "engine.denoise" if finish.usage.denoise_steps else "engine.decode"
    span.child("engine.queue", start_ns=min(queued_ns, started)).end(end_ns=started)
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
