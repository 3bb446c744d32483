"""The prefill engines that a decode engine fetches from: connections to them, whom it leaves alone
for a while, and what it means when a call fails. It does not know what is fetched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from engine_service.config import EngineConfig
from tidemill.runtime.errors import FailedPrecondition, ServiceError, Unavailable
from tidemill.runtime.rpc import channel_options, to_error
from tidemill.security.client_tls import ClientTls, Dialer, Dialing

_MAX_SOURCES = 64
"""Engines that a connection is kept to; the oldest one is closed."""
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


class Sources:
    """channel, reaching, error_of, rests, part, is_apart, close. Engines go by the address that
    requests name."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises FailedPrecondition for certificates that do not serve."""
        self._tls_name = config.kv_tls_name
        self._timeout_s = config.kv_transfer_timeout_s
        self._dialing = Dialing(channel_options(config.max_message_bytes), _tls(config))
        self._open: dict[str, tuple[Dialer, grpc.aio.Channel | None]] = {}
        self._apart: dict[str, float] = {}
        """Until when engines are not asked for shared memory."""
        self._resting: dict[str, float] = {}
        """Until when engines are not asked at all."""

    async def channel(self, address: str) -> grpc.aio.Channel:
        """With the certificates that are there now."""
        dialer, channel = self._open.pop(address, (None, None))
        dialer = dialer or self._dialing.dialer(address)
        channel = await dialer.fresh(channel)
        self._open[address] = (dialer, channel)
        if len(self._open) > _MAX_SOURCES:
            _, oldest = self._open.pop(next(iter(self._open)))
            if oldest is not None:
                await oldest.close()
        return channel

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
        for _, channel in self._open.values():
            if channel is not None:
                await channel.close()
        self._open.clear()


def _tls(config: EngineConfig) -> ClientTls | None:
    """How prefill engines are spoken to; None: in plaintext."""
    if config.kv_tls_ca is not None:
        return ClientTls(config.kv_tls_ca, config.tls_cert, config.tls_key, config.kv_tls_name)
    if config.kv_tls_name is not None:
        raise FailedPrecondition(
            f"--kv-tls-name {config.kv_tls_name} is the name in prefill engines' certificates, and "
            "without --kv-tls-ca they are spoken to in plaintext; give --kv-tls-ca, the CA of "
            "these certificates, or leave the name out",
            reason="TLS_FILES",
            param="kv_tls_name",
        )
    return None
