"""gRPC habits of all methods but health: request ids, the line in the log, and a span and a count
for what was refused before it was a request of a model. It does not know what the methods do.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from frontend.api.grpc_around import around
from frontend.desk import FrontDesk
from frontend.gate import Gate
from tidemill.runtime.errors import InvalidRequest, ServiceError
from tidemill.runtime.rpc import abort, is_late
from tidemill.security.addresses import peer_address
from tidemill.telemetry import semconv
from tidemill.telemetry.context import TraceContext
from tidemill.telemetry.context import parse as parse_trace
from tidemill.telemetry.tracer import Span

HEALTH = "/grpc.health.v1.Health/"
_OIP = "/inference.GRPCInferenceService/"
PROBES = frozenset({f"{_OIP}ServerLive", f"{_OIP}ServerReady"})
"""Yes or no, without a key."""
_MAX_ID_CHARS = 128
_LOG = logging.getLogger("tidemill.frontend.grpc")


@dataclass(slots=True)
class Arrival:
    """One call of a method, from its first byte to its end. `received` is seconds of the event
    loop's clock (CLOCK_MONOTONIC)."""

    method: str
    """Service and name, as spans and metrics have it."""
    metadata: dict[str, str]
    """Without those that are bytes; what came several times has commas between."""
    request_id: str
    client: str
    received: float
    caller: str = ""
    """Name of the key, once the gate has seen it."""
    span: Span | None = None
    """Of the newest request in it; None: it was refused ahead of one, or has no need of any."""


_ARRIVAL: ContextVar[Arrival] = ContextVar("arrival")


def arrival() -> Arrival:
    """The call that runs in this task."""
    return _ARRIVAL.get()


class IngressInterceptor(grpc.aio.ServerInterceptor):
    """Outermost, ahead of the gate."""

    def __init__(self, desk: FrontDesk, gate: Gate) -> None:
        self._desk = desk
        self._gate = gate

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(HEALTH):
            return handler
        return around(handler, partial(self._call, details.method))

    @asynccontextmanager
    async def _call(self, path: str, context: Any) -> AsyncIterator[None]:
        call = self._arrive(path, context)
        _ARRIVAL.set(call)  # of this task alone, which ends with the call
        failure: BaseException | None = None
        try:
            await _check_id(call, context)
            yield
        except BaseException as caught:
            failure = caught
            raise
        finally:
            self._ended(call, _status(call, context, failure), is_probe=path in PROBES)

    def _arrive(self, path: str, context: Any) -> Arrival:
        metadata: dict[str, str] = {}
        for name, text in context.invocation_metadata():
            if isinstance(text, str):
                metadata[name] = f"{metadata[name]},{text}" if name in metadata else text
        forwarded = metadata.get("x-forwarded-for", "")
        given_id = metadata.get("x-request-id", "")
        call = Arrival(
            method=path.removeprefix("/"),
            metadata=metadata,
            request_id=given_id if _is_id(given_id) else uuid.uuid4().hex,
            client=self._gate.client(peer_address(context.peer()), forwarded),
            received=asyncio.get_running_loop().time(),
        )
        context.set_trailing_metadata((("x-request-id", call.request_id),))
        return call

    def _ended(self, call: Arrival, status: str, *, is_probe: bool) -> None:
        """Walks of a model's requests have a line, a span and a count of their own; all others have
        the line here, and refused ones everything."""
        seconds = asyncio.get_running_loop().time() - call.received
        is_well, has_own = status == "OK", call.span is not None
        if not is_well and call.span is None:
            above, began_ns = trace_above(call.metadata), int(1e9 * call.received)
            call.span = self._desk.tracer.start(call.method, above, start_ns=began_ns)
            end_span(call.span, call.method, status, f"refused: {status}")
            self._desk.metrics.rpc_duration.labels(call.method, status).observe(seconds)
        tell(call, status, seconds, logging.DEBUG if is_well and (has_own or is_probe) else None)


def tell(call: Arrival, status: str, seconds: float, level: int | None = None) -> None:
    """The line that says how a call, or one request of a stream, has ended."""
    facts: dict[str, Any] = {"request_id": call.request_id}
    if call.span is not None and call.span.context is not None:
        facts |= call.span.context.ids
    facts |= {"client": call.client, "status": status, "seconds": round(seconds, 4)}
    if call.caller:
        facts["key"] = call.caller
    _LOG.log(level or logging.INFO, "%s %s", call.method, status, extra=facts)


def trace_above(metadata: Mapping[str, str]) -> TraceContext | None:
    """The caller's place in a trace."""
    return parse_trace(metadata.get("traceparent", ""), metadata.get("tracestate", ""))


def end_span(span: Span, method: str, status: str, error: str | None) -> None:
    """Ends the SERVER span of a call; `error` is None where it went well."""
    attributes: semconv.Attributes = {
        semconv.RPC_SYSTEM: "grpc",
        semconv.RPC_METHOD: method,
        semconv.RPC_STATUS: status,
    }
    if error is not None:
        attributes[semconv.ERROR_TYPE] = status
    span.end(attributes=attributes, error=error)


def status_of(failure: BaseException | None, *, late: bool) -> str:
    """How a call ends that ends with `failure`: gRPC cancels a call whose time is up (`late`) as it
    cancels one whose client has left."""
    if isinstance(failure, ServiceError):
        return semconv.status_name(failure.grpc_code)
    if isinstance(failure, grpc.aio.UsageError):
        return "INTERNAL"
    if isinstance(failure, asyncio.CancelledError | GeneratorExit | grpc.aio.BaseError):
        return "DEADLINE_EXCEEDED" if late else "CANCELLED"
    return "OK" if failure is None else "INTERNAL"


def _status(call: Arrival, context: Any, failure: BaseException | None) -> str:
    """Of a call whose error, if any, is a status already. A call that was over before its status
    could be sent ends with another error of gRPC's than AbortError, and keeps the status."""
    code = context.code()  # None: nobody has set one
    if isinstance(failure, grpc.aio.BaseError) and code:
        return code.name if isinstance(code, grpc.StatusCode) else semconv.status_name(code)
    now, left_s = asyncio.get_running_loop().time(), context.time_remaining()
    deadline = None if left_s is None else now + left_s
    return status_of(failure, late=is_late(call.received, now, deadline))


async def _check_id(call: Arrival, context: Any) -> None:
    given = call.metadata.get("x-request-id", "")
    if given and not _is_id(given):
        error = InvalidRequest(
            f"the metadata x-request-id has {len(given)} characters; it must have at most "
            f"{_MAX_ID_CHARS}, all of them printable ASCII",
            param="x-request-id",
        )
        await abort(context, error)


def _is_id(text: str) -> bool:
    return 0 < len(text) <= _MAX_ID_CHARS and text.isascii() and text.isprintable()
