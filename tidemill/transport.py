"""How a client's calls travel: inside the caller's trace, within one deadline, and again where the
server says that waiting helps.

It knows no method: what a call sends and what its answer means is `tidemill.client`'s.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any

import grpc

from tidemill.exchange import CallOptions, metadata_of, timeout_of
from tidemill.given import of_kind, printable
from tidemill.runtime.errors import EngineDead, InvalidRequest, ServiceError
from tidemill.runtime.rpc import to_error

DEFAULT_RETRIES = 2
_LOOK_UPS = frozenset({"Tokenize", "Detokenize", "ListModels", "GetModel"})
"""Methods so cheap that they may be asked again whenever the other side was gone."""
_PAUSE_S = 0.2
"""Before a look-up is asked again."""
_FOR_EVER_S = 1e9
"""A time to be counted to in nanoseconds overflows, and counts as past, from 1e10 on."""
_SPREAD = 0.25
"""Share of a pause by which it is drawn longer, so that callers refused together return apart."""


class Attempts:
    """One call's attempts and what is left of its time."""

    def __init__(self, method: str, options: CallOptions | None, max_retries: int) -> None:
        self._is_look_up = method in _LOOK_UPS
        self._left = max_retries
        timeout_s = timeout_of(options)
        if timeout_s is None or timeout_s >= _FOR_EVER_S:
            self._until: float | None = None
        elif math.isnan(timeout_s):
            raise InvalidRequest("timeout_s is nan; it must be a number", param="timeout_s")
        else:
            self._until = time.monotonic() + timeout_s

    @property
    def timeout_s(self) -> float | None:
        """Of the next attempt: the deadline holds for all of them together."""
        return None if self._until is None else max(self._until - time.monotonic(), 0.0)

    def pause_after(self, failure: grpc.RpcError, *, has_begun: bool = False) -> float:
        """Seconds until the call may be sent again. Raises the failure's ServiceError where it must
        not be, having `has_begun` to be answered for one, or would not be answered in time."""
        error = to_error(failure)
        pause = None if has_begun else self._pause(error)
        if pause is None:
            raise error from failure
        return pause

    def _pause(self, error: ServiceError) -> float | None:
        if not self._left or not error.retriable:
            return None
        self._left -= 1
        pause = self._asked_pause(error)
        if pause is None:
            return None
        pause *= 1 + random.random() * _SPREAD
        if self._until is not None and time.monotonic() + pause >= self._until:
            return None
        return pause

    def _asked_pause(self, error: ServiceError) -> float | None:
        """Without the server's word nobody knows how much of a generation was done. What an engine
        died of is not fed to the next one, whatever the server says."""
        is_deadly = error.reason == EngineDead.default_reason
        if error.retry_after_ms is not None and not is_deadly:
            return error.retry_after_ms / 1000
        return _PAUSE_S if self._is_look_up else None


class _Sender:
    """A stub and how often a call may be sent to it again."""

    def __init__(self, stub: Any, max_retries: int, api_key: str = "") -> None:
        self._stub = stub
        self._max_retries = of_kind("Client", "max_retries", int, max_retries)
        if self._max_retries < 0:  # it is counted down to 0
            raise InvalidRequest(
                f"max_retries is {max_retries}; pass 0, for none, or more", param="max_retries"
            )
        bearer = f"Bearer {printable('api_key', api_key)}"
        self._shown = (("authorization", bearer),) if api_key else ()

    def _send(
        self, method: str, request: Any, options: CallOptions | None, attempts: Attempts
    ) -> Any:
        return getattr(self._stub, method)(
            request, timeout=attempts.timeout_s, metadata=_metadata(options) + self._shown
        )


class Calls(_Sender):
    """Blocking calls of a stub."""

    def answer(self, method: str, request: Any, options: CallOptions | None) -> Any:
        """The response. Raises ServiceError."""
        attempts = Attempts(method, options, self._max_retries)
        while True:
            try:
                return self._send(method, request, options, attempts)
            except grpc.RpcError as failure:
                pause = attempts.pause_after(failure)
            time.sleep(pause)

    def stream(
        self, method: str, request: Any, options: CallOptions | None
    ) -> Generator[Any, None, None]:
        """The messages; once there was one nothing is sent again. Leaving early ends the call."""
        attempts = Attempts(method, options, self._max_retries)
        while True:
            call = self._send(method, request, options, attempts)
            has_begun = False
            try:
                for message in call:
                    has_begun = True
                    yield message
                return
            except grpc.RpcError as failure:
                pause = attempts.pause_after(failure, has_begun=has_begun)
            finally:
                call.cancel()
            time.sleep(pause)


class AsyncCalls(_Sender):
    """Calls of an asyncio stub."""

    async def answer(self, method: str, request: Any, options: CallOptions | None) -> Any:
        """The response. Raises ServiceError."""
        attempts = Attempts(method, options, self._max_retries)
        while True:
            call = self._send(method, request, options, attempts)
            try:
                return await call
            except grpc.RpcError as failure:
                pause = attempts.pause_after(failure)
            finally:
                call.cancel()
            await asyncio.sleep(pause)

    async def stream(
        self, method: str, request: Any, options: CallOptions | None
    ) -> AsyncGenerator[Any, None]:
        """The messages; once there was one nothing is sent again. Leaving early ends the call."""
        attempts = Attempts(method, options, self._max_retries)
        while True:
            call = self._send(method, request, options, attempts)
            has_begun = False
            try:
                async for message in call:
                    has_begun = True
                    yield message
                return
            except grpc.RpcError as failure:
                pause = attempts.pause_after(failure, has_begun=has_begun)
            finally:
                call.cancel()  # leaving `async for` early does not end the call by itself
            await asyncio.sleep(pause)


def _metadata(options: CallOptions | None) -> tuple[tuple[str, str], ...]:
    """The options', and where they name no trace the caller's current one."""
    pairs = metadata_of(options)
    if any(name == "traceparent" for name, _ in pairs):
        return pairs
    return pairs + _current_trace()


def _current_trace() -> tuple[tuple[str, str], ...]:
    """W3C trace context of the span around the call, if there is one. Who has not imported
    OpenTelemetry has none, and need not import it."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
