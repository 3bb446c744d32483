"""HTTP habits of all routes: request ids, deadlines, spans, errors, clients that leave.

It does not know what the routes do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.api.envelopes import error_body, is_anthropic
from frontend.api.safe_headers import safe_headers, with_safe
from frontend.desk import FrontDesk
from frontend.gate import Gate
from frontend.request import Ingress
from tidemill.runtime.errors import Cancelled, InternalError, InvalidRequest, NotFound, ServiceError
from tidemill.telemetry import semconv
from tidemill.telemetry.context import parse as parse_trace
from tidemill.telemetry.tracer import Span

_LOG = logging.getLogger("tidemill.frontend.http")
SEND_PIECE = "send_piece"
"""Of a request's state: how the pieces of a body are sent once its head is out."""
CUT = "cut"
"""Of a request's state: why its answer ended before it was whole, though its status was good."""
HEALTH = frozenset(
    {
        "/health",
        "/health/live",
        "/health/ready",
        "/ping",
        "/v1/health",
        "/v2/health/live",
        "/v2/health/ready",
    }
)
METRICS = "/metrics"
LOAD = "/load"
"""Routers ask for it as often as others probe."""
_MAX_ID_CHARS = 128
_MAX_TIMEOUT_DIGITS = 15
_MAX_SESSION_CHARS = 256
_MAX_PATH_CHARS = 200
_NO_ROUTE = "unknown"
"""What metrics call the route of a path that has none."""
_VERBS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
Result = TypeVar("Result")


class MethodNotAllowed(InvalidRequest):
    """405: a known path, another verb."""

    http_status: ClassVar[int] = 405
    default_reason = "METHOD_NOT_ALLOWED"
    allowed = ""
    """The verbs that the path knows, as the header `allow` lists them (RFC 9110, 15.5.6)."""


class JsonResponse(Response):
    """A body that orjson renders."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """JSON bytes."""
        return orjson.dumps(content)


class IngressMiddleware:
    """Outermost: gives each request its id, deadline and SERVER span, logs and counts it, and gives
    each answer the headers that keep browsers safe."""

    def __init__(self, app: ASGIApp, desk: FrontDesk, gate: Gate) -> None:
        self._app = app
        self._desk = desk
        self._gate = gate
        self._safe = safe_headers(is_tls=desk.config.tls_cert is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        path, status, state = scope["path"], 0, scope.setdefault("state", {})
        span = self._start_span(request)
        given_id = request.headers.get("x-request-id", "")
        request_id = given_id if _is_id(given_id) else uuid.uuid4().hex
        began, client = asyncio.get_running_loop().time(), self._client(scope, request)
        _LOG.debug("%s %s from %s", request.method, path, client)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", *([b"request-id"] if is_anthropic(path) else []))
                ours = [(name, request_id.encode()) for name in names]
                if self._desk.is_draining:  # the next request finds its way to somebody else
                    ours.append((b"connection", b"close"))
                message["headers"] = with_safe([*message["headers"], *ours], self._safe)
            await send(message)

        try:
            state[SEND_PIECE] = send  # everyone between here and a route looks at heads alone
            state["ingress"] = self._ingress(request, request_id, span, client)
            await self._app(scope, receive, send_with_id)
        except Exception as failure:
            if status:
                raise  # half of another answer is out
            error = to_service_error(failure, request)
            await error_response(error, path)(scope, receive, send_with_id)
        finally:
            del state[SEND_PIECE]  # the scope belongs to its owner: the two would be a cycle
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            counts = self._desk.metrics.http
            counts.requests.labels(route, request.method, status).inc()
            seconds = asyncio.get_running_loop().time() - began
            counts.duration.labels(route, request.method).observe(seconds)
            self._end_span(span, request, route, status)
            self._log_end(request, _facts(request_id, span), client, status, seconds)

    def _start_span(self, request: Request) -> Span:
        path = request.scope["path"]
        above = parse_trace(_all_of(request, "traceparent"), _all_of(request, "tracestate"))
        if not path.startswith(("/v1/", "/v2/")) or request.method != "POST":
            return Span(self._desk.tracer, above)  # probes and scrapes are not traced
        return self._desk.tracer.start(f"{request.method} {path}", above)

    def _client(self, scope: Scope, request: Request) -> str:
        peer = scope.get("client")
        # A proxy may add a line of its own behind those that its caller made up.
        return self._gate.client(peer[0] if peer else "", _all_of(request, "x-forwarded-for"))

    def _log_end(
        self, request: Request, facts: dict[str, Any], client: str, status: int, seconds: float
    ) -> None:
        """Walks of a model's requests have a line of their own, which says more; here are all that
        were refused, and all others but probes."""
        path = request.scope["path"]
        has_line = status < 400 and request.method == "POST" and path.startswith("/v1/")
        is_probe = (path in HEALTH or path in (METRICS, LOAD)) and status != 500
        level = logging.DEBUG if has_line or is_probe else logging.INFO
        if not _LOG.isEnabledFor(level):
            return
        ingress = request.scope["state"].get("ingress")
        facts |= {"client": client, "status": status, "seconds": round(seconds, 4)}
        if ingress is not None and ingress.caller:
            facts["key"] = ingress.caller
        _LOG.log(level, "%s %s %d", request.method, path[:_MAX_PATH_CHARS], status, extra=facts)

    def _end_span(self, span: Span, request: Request, route: str, status: int) -> None:
        """Named by its route, if there is one: a path may hold ids, or anything. Status 0: the
        client left before any answer."""
        attributes: semconv.Attributes = {
            semconv.HTTP_METHOD: request.method,
            semconv.URL_SCHEME: request.scope.get("scheme", "http"),  # a server need not say
            semconv.URL_PATH: request.scope["path"],
        }
        name, error = request.method, None
        if route != _NO_ROUTE:
            attributes[semconv.HTTP_ROUTE] = route
            name += f" {route}"
        if status:
            attributes[semconv.HTTP_STATUS] = status
        if not 0 < status < 500:
            attributes[semconv.ERROR_TYPE] = str(status or "cancelled")
            error = f"status {status}" if status else "the client left"
        elif cut := request.scope["state"].get(CUT):
            attributes[semconv.ERROR_TYPE] = cut
            error = f"the answer ended early: {cut}"
        span.end(attributes=attributes, error=error, name=name)

    def _ingress(self, request: Request, request_id: str, span: Span, client: str) -> Ingress:
        received = asyncio.get_running_loop().time()
        given_id = request.headers.get("x-request-id", "")
        if given_id and not _is_id(given_id):
            raise InvalidRequest(
                f"the header x-request-id has {len(given_id)} characters; it must have 1 to "
                f"{_MAX_ID_CHARS}, all of them printable ASCII",
                param="x-request-id",
            )
        timeout = request.headers.get("x-request-timeout-ms")
        if timeout is not None and not _is_milliseconds(timeout):
            raise InvalidRequest(
                f"the header x-request-timeout-ms is {timeout[:40]!r} ({len(timeout)} characters); "
                f"it must be a whole number of milliseconds of 1 to {_MAX_TIMEOUT_DIGITS} digits",
                param="x-request-timeout-ms",
            )
        seconds = None if timeout is None else int(timeout) / 1000
        deadline = self._desk.deadline(received, seconds)
        return Ingress(
            request_id=request_id,
            received=received,
            created=int(time.time()),
            span=span,
            deadline=deadline,
            session=request.headers.get("x-session-id", "")[:_MAX_SESSION_CHARS],
            asked=request.scope["path"],
            client=client,
        )


def error_response(error: ServiceError, path: str) -> Response:
    """The error as the API of `path` words it, with Retry-After where waiting helps."""
    headers = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    return JsonResponse(error_body(error, path), status_code=error.http_status, headers=headers)


def to_service_error(failure: Exception, request: Request) -> ServiceError:
    """What any exception of a route is to the client; a bug is logged with its trace."""
    if isinstance(failure, ServiceError):
        return failure
    if isinstance(failure, ClientDisconnect):
        return Cancelled("the client closed the connection before its request was whole")
    if isinstance(failure, HTTPException) and failure.status_code == 405:
        refused = MethodNotAllowed(f"{request.method} is not allowed for {request.url.path}")
        refused.allowed = _allowed(request)
        return refused
    if isinstance(failure, HTTPException):
        return NotFound(f"there is no route {request.method} {request.url.path}")
    _LOG.error("a request failed", exc_info=failure)
    return InternalError(f"internal error: {type(failure).__name__}: {failure}")


def _allowed(request: Request) -> str:
    """Of all routes of the path: the exception names the verbs of the first one."""
    routes, asked = request.app.routes, request.scope
    return ", ".join(
        verb
        for verb in _VERBS
        if any(one.matches({**asked, "method": verb})[0] is Match.FULL for one in routes)
    )


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work`, but cancels it when the client leaves; raises Cancelled then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client closed the connection")
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _all_of(request: Request, name: str) -> str:
    """The values of a header that may come several times, with commas between (RFC 9110, 5.3)."""
    return ",".join(request.headers.getlist(name))


def _facts(request_id: str, span: Span) -> dict[str, str]:
    """What joins a log line with the request and its trace."""
    return {"request_id": request_id, **(span.context.ids if span.context else {})}


def _is_milliseconds(text: str) -> bool:
    return len(text) <= _MAX_TIMEOUT_DIGITS and text.isdecimal() and int(text) > 0


def _is_id(text: str) -> bool:
    return 0 < len(text) <= _MAX_ID_CHARS and text.isascii() and text.isprintable()
