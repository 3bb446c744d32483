"""The prefill engines that a decode engine fetches from: connections to them, whom it leaves alone
for a while, and what it means when a call fails. It does not know what is fetched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from engine_service.config import EngineConfig
from tidemill.runtime.errors import FailedPrecondition, ServiceError, Unavailable
from tidemill.runtime.rpc import channel_options, to_error
from tidemill.security.client_tls import ClientTls, Dialer, Dialing

_Call = TypeVar("_Call", bound=grpc.aio.Call)

_MAX_SOURCES = 64
"""Engines that a connection is kept to; the one that was not called for longest is given up."""
_APART_S = 60.0
"""How long an engine whose memory could not be read is asked for messages: it may just be gone."""
_REST = 9
"""An engine is left alone for so many times what it took not to reach it, so that prompts wait for
nothing in at most a tenth of the time."""


_WRONG_NAME = "Hostname Verification Check failed"
"""Of gRPC, and all that it says of a certificate that bears another name."""

_UNSAID = "Internal error from Core"
"""Of gRPC, where a message could not be sent and the reason has not come yet: nor will it."""


def is_unsaid(failure: grpc.RpcError) -> bool:
    """Whether gRPC has lost the reason of a failure that a new call would name."""
    return failure.code() is grpc.StatusCode.INTERNAL and failure.details() == _UNSAID


class _Line:
    """A connection, and how many calls are on it."""

    def __init__(self, dialer: Dialer) -> None:
        self.dialer, self.channel, self.num_calls = dialer, dialer.open(), 0


class Sources:
    """call, reaching, error_of, rests, part, is_apart, close. Engines go by the address that
    requests name."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises FailedPrecondition for certificates that do not serve."""
        self._tls_name = config.kv_tls_name
        self._timeout_s = config.kv_transfer_timeout_s
        self._dialing = Dialing(channel_options(config.max_message_bytes), _tls(config))
        self._lines: dict[str, _Line] = {}
        self._left: set[_Line] = set()
        """Given up, and closed when their last call ends."""
        self._closing: set[asyncio.Task[None]] = set()
        self._apart: dict[str, float] = {}
        """Until when engines are not asked for shared memory."""
        self._resting: dict[str, float] = {}
        """Until when engines are not asked at all."""

    def call(self, address: str, start: Callable[[grpc.aio.Channel], _Call]) -> _Call:
        """What `start` begins on a channel with the certificates that are there now. Calls go on
        that have begun with others."""
        line = self._lines.pop(address, None)
        if line is not None and line.dialer.is_stale:
            self._leave(line)
            line = None
        line = self._lines[address] = line or _Line(self._dialing.dialer(address))
        if len(self._lines) > _MAX_SOURCES:
            self._leave(self._lines.pop(next(iter(self._lines))))
        call = start(line.channel)
        line.num_calls += 1
        call.add_done_callback(lambda _: self._end(line))
        return call

    def rests(self, address: str) -> bool:
        """Whether the engine could not be reached a short while ago."""
        return self._resting.get(address, 0.0) > time.monotonic()

    def is_apart(self, address: str) -> bool:
        """Whether the engine's memory could not be read a while ago."""
        return self._apart.get(address, 0.0) > time.monotonic()

    def part(self, address: str) -> None:
        """The engine's memory cannot be read here."""
        now = time.monotonic()
        self._apart = {one: until for one, until in self._apart.items() if until > now}
        self._apart[address] = now + _APART_S

    @contextmanager
    def reaching(self, address: str) -> Iterator[None]:
        """Around what waits for a connection: in vain, too, when it took all the time there is.
        That a client has left says nothing of an engine."""
        began = time.monotonic()
        try:
            yield
        except (grpc.RpcError, asyncio.CancelledError) as failure:
            now = time.monotonic()
            if isinstance(failure, asyncio.CancelledError) and now - began < 0.9 * self._timeout_s:
                raise
            self._resting = {one: until for one, until in self._resting.items() if until > now}
            rested = now + min(_APART_S, _REST * (now - began))
            self._resting[address] = max(rested, self._resting.get(address, 0.0))
            raise

    def error_of(self, failure: grpc.RpcError, address: str) -> ServiceError:
        """What ended a call to the engine: its own error, or why there is no connection."""
        error = to_error(failure)
        is_lost = is_unsaid(failure) or isinstance(error, Unavailable)
        if failure.trailing_metadata() or not is_lost:
            return error
        if _WRONG_NAME not in error.message:
            why = "it broke while a message was sent" if is_unsaid(failure) else error.message
            return Unavailable(
                f"no connection to the prefill engine at {address}: {why}; check that it runs, "
                "that its gRPC port lets this host in, and that either both speak TLS (--tls-cert "
                "there, --kv-tls-ca here) or neither does",
                reason="KV_SOURCE_UNREACHABLE",
            )
        name = "the host of its address" if self._tls_name is None else f"{self._tls_name!r}"
        return FailedPrecondition(
            f"the certificate of the prefill engine at {address} does not bear the name that is "
            f"expected, {name}; give --kv-tls-name a name that it bears",
            reason="TLS_NAME",
            param="kv_tls_name",
        )

    async def close(self) -> None:
        """Ends the connections."""
        for line in (*self._lines.values(), *self._left):
            await line.channel.close()
        self._lines.clear()
        await asyncio.gather(*self._closing)

    def _leave(self, line: _Line) -> None:
        self._left.add(line)
        self._close_if_over(line)

    def _end(self, line: _Line) -> None:
        line.num_calls -= 1
        self._close_if_over(line)

    def _close_if_over(self, line: _Line) -> None:
        if line in self._left and not line.num_calls:
            self._left.discard(line)
            closing = asyncio.create_task(line.channel.close(), name=f"{line.dialer.address} ends")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def _tls(config: EngineConfig) -> ClientTls | None:
    """How prefill engines are spoken to; None: in plaintext."""
    if config.kv_tls_ca is not None:
        return ClientTls(config.kv_tls_ca, config.tls_cert, config.tls_key, config.kv_tls_name)
    return None
