"""gRPC habits both services share: options, ports, and errors as statuses and back.

It does not know our messages; ServiceError carries everything a status needs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from tidemill.runtime.errors import (
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    ServiceError,
    Unavailable,
    from_grpc_code,
)

_DETAILS = "grpc-status-details-bin"
_TEXT_BYTES, _NAME_BYTES, _FACTS_BYTES = 1024, 256, 1024
"""A status travels in HTTP/2 headers, which clients cap at 8 KiB. The text counts up to four times
and a third: once percent-encoded (grpc-message) and once in base64 (the details)."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LOG = logging.getLogger("tidemill.rpc")
Options = list[tuple[str, int | str]]


def _common_options(max_message_bytes: int, max_received_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_received_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int) -> Options:
    """A busy port is an error (no SO_REUSEPORT), client pings never kill a connection, and the
    stream limit lies far above the request queue, so that admission refuses, not the transport."""
    return [
        *_common_options(max_message_bytes, max_message_bytes),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 16_384),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(
    max_message_bytes: int, *, least_received_bytes: int = 0, unanswered_ms: int = 10_000
) -> Options:
    """No hidden retries; fast first reconnect. What gRPC calls the least backoff is how long an
    attempt may take: a busy server may be as slow to answer it as to answer a ping. A server that
    is trusted may send messages of `least_received_bytes`, however little it is sent itself.

    What the other host has not acknowledged for `unanswered_ms` ends the connection (keepalive's
    timeout is TCP_USER_TIMEOUT too, on Linux): who sends often notices soon that the network is
    cut. A process that stands still is not taken for that: its kernel acknowledges for it,
    until what is sent to it meanwhile fills its buffers (some MB)."""
    return [
        *_common_options(max_message_bytes, max(max_message_bytes, least_received_bytes)),
        ("grpc.keepalive_timeout_ms", unanswered_ms),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", 300),
    ]


def bind(
    server: grpc.aio.Server, host: str, port: int, *, flag: str, credentials: Any = None
) -> int:
    """Binds and returns the port (0 takes a free one); FailedPrecondition when it is taken.

    Without `credentials` (tidemill.security.server_tls) the port is plaintext.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    add = [server.add_secure_port, credentials] if credentials else [server.add_insecure_port]
    try:
        bound: int = add[0](address, *add[1:])
    except RuntimeError as failure:
        raise FailedPrecondition(
            f"cannot listen on {address}: the port is in use or the address is not ours; "
            f"stop the other process or choose another port with {flag} (0 takes a free one)",
            reason="PORT_IN_USE",
            param=flag,
        ) from failure
    return bound


def to_status(error: ServiceError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and BadRequest and RetryInfo where they apply.

    Long texts are cut, so that the status itself never fails; the message stands in it once.
    """
    message, param, facts = in_short(error)
    status = status_pb2.Status(code=error.grpc_code, message=message)
    metadata = {**({"param": param} if param else {}), **facts}
    cause = error_details_pb2.ErrorInfo(reason=error.reason, domain="tidemill", metadata=metadata)
    status.details.add().Pack(cause)
    if param and error.grpc_code == 3:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=param, description=error.reason)
        status.details.add().Pack(bad)
    if error.retry_after_ms is not None:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def to_error(failure: grpc.RpcError) -> ServiceError:
    """The ServiceError that a failed call stands for, with the details the server packed."""
    code, text = failure.code(), failure.details() or ""
    error = from_grpc_code(code.value[0])(text, reason=code.name)
    packed = dict(failure.trailing_metadata() or ()).get(_DETAILS)
    for detail in status_pb2.Status.FromString(packed).details if packed else ():
        cause, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(cause):
            error.facts = dict(cause.metadata)
            error.reason, error.param = cause.reason, error.facts.pop("param", None)
        elif detail.Unpack(retry):
            error.retry_after_ms = retry.retry_delay.ToMilliseconds()
    return error


def is_late(began: float, now: float, deadline: float | None) -> bool:
    """Whether a call that gRPC has cancelled had its time, as far as its server can tell (seconds
    of one clock): a client's own deadline is earlier, as `grpc-timeout` is rounded up by as much as
    a hundredth, and timers wake late."""
    return deadline is not None and deadline - now <= 0.01 * (1 + deadline - began)


async def ended(stream: Any) -> ServiceError:
    """What ended a stream that was read to its end; an orderly end is Unavailable too."""
    code, text = await stream.code(), await stream.details()
    if code is grpc.StatusCode.OK:
        return Unavailable("the other side closed the stream")
    return from_grpc_code(code.value[0])(text or code.name, reason=code.name)


@asynccontextmanager
async def answering(context: Any) -> AsyncIterator[None]:
    """Around a handler's body: a ServiceError becomes its rich status, a bug INTERNAL."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except ServiceError as error:
        await abort(context, error)
    except DecodeError as failure:
        text = f"malformed message: {failure}; build client and server from the same contract"
        await abort(context, InvalidRequest(text, reason="MALFORMED_MESSAGE"))
    except Exception as bug:
        _LOG.exception("a handler failed")
        await abort(context, InternalError(f"internal error: {type(bug).__name__}: {bug}"))


async def abort(context: Any, error: ServiceError) -> None:
    """Ends the call with the error's status, behind the trailers it has; always raises."""
    status = to_status(error)
    packed = (*context.trailing_metadata(), (_DETAILS, status.SerializeToString()))
    await context.abort(_CODES[error.grpc_code], status.message, trailing_metadata=packed)


def in_short(error: ServiceError) -> tuple[str, str, dict[str, str]]:
    """Its message, parameter and facts, cut: they may repeat what a client sent, at any length."""
    param = _cut(error.param or "", _NAME_BYTES)
    return _cut(error.message, _TEXT_BYTES), param, _short_facts(error.facts)


def _short_facts(facts: dict[str, str]) -> dict[str, str]:
    """As many of the facts as there is room for, each cut."""
    kept, room = {}, _FACTS_BYTES
    for name, text in facts.items():
        name, text = _cut(name, _NAME_BYTES), _cut(text, _NAME_BYTES)
        room -= len(name.encode()) + len(text.encode())
        if room < 0:
            break
        kept[name] = text
    return kept


def _cut(text: str, num_bytes: int) -> str:
    """The longest beginning of whole characters that has at most `num_bytes` in UTF-8."""
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")
