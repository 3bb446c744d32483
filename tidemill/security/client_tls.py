"""How a client makes sure of its server, and shows itself: channels over TLS and mTLS.

It does not know what is called.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tidemill.runtime.errors import FailedPrecondition, InvalidRequest
from tidemill.security.tls_flags import check_client_flags
from tidemill.security.watched import Watched

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Paths of PEM files. Without `ca` the server's certificate is checked against gRPC's own
    list of public CAs; `cert` and `key` are what a server with mTLS asks for."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    name: str | None = None
    """The name in the server's certificate, where it differs from the address."""

    @property
    def paths(self) -> list[str]:
        """The files that are read."""
        return [path for path in (self.ca, self.cert, self.key) if path is not None]

    def options(self) -> list[tuple[str, int | str]]:
        """Of the channel."""
        return [] if self.name is None else [("grpc.ssl_target_name_override", self.name)]

    def credentials(self) -> grpc.ChannelCredentials:
        """From the files as they are now. Raises FailedPrecondition naming what is wrong."""
        try:
            self._check()
            ca, cert, key = (
                None if path is None else Path(path).read_bytes()
                for path in (self.ca, self.cert, self.key)
            )
        except (OSError, ValueError) as failure:
            raise FailedPrecondition(
                f"cannot use the certificates {', '.join(self.paths)}: {failure}; give PEM files: "
                "the server's CA, and for mTLS the client's certificate and its key",
                reason="TLS_FILES",
            ) from failure
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _check(self) -> None:
        """gRPC takes whatever bytes there are, and says nothing but that no connection comes."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client certificate and its key go together")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is not None:
            context.load_verify_locations(self.ca)
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key, password=_no_passphrase)


def client_tls(
    ca: str | None, cert: str | None, key: str | None, name: str | None
) -> ClientTls | None:
    """What the flags of a service ask for; without a CA the other side is plaintext."""
    check_client_flags(ca, cert, key, name)
    return None if ca is None else ClientTls(ca, cert, key, name)


def _check_target(address: object, tls: object) -> None:
    """Raises InvalidRequest for what would fail on an attribute that it does not have."""
    if not isinstance(address, str):
        raise _wrong("address", address, "a text, such as 127.0.0.1:50051")
    if tls is not None and not isinstance(tls, ClientTls):
        raise _wrong("tls", tls, "a ClientTls, or None for plaintext")


def _wrong(name: str, value: object, wording: str) -> InvalidRequest:
    """Does not show the value: it may be a key."""
    return InvalidRequest(f"{name} is of type {type(value).__name__}; pass {wording}", param=name)


def open_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.aio.Channel:
    """A channel for asyncio. Raises InvalidRequest."""
    _check_target(address, tls)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), [*options, *tls.options()])


def open_blocking_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.Channel:
    """A channel for threads. Raises InvalidRequest."""
    _check_target(address, tls)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), [*options, *tls.options()])


Files = Watched[grpc.ChannelCredentials] | None


class Dialing:
    """How a service speaks to others of one kind, whatever their addresses."""

    def __init__(self, options: Options, tls: ClientTls | None) -> None:
        """Raises FailedPrecondition for files that do not serve."""
        # Connections of their own: one that went silent is replaced, not found in gRPC's pool.
        own = [("grpc.use_local_subchannel_pool", 1), *(tls.options() if tls else ())]
        self._options = [*options, *own]
        self._files: Files = None if tls is None else Watched(tls.paths, tls.credentials)

    def dialer(self, address: str) -> Dialer:
        """For one of them."""
        return Dialer(address, self._options, self._files)


class Dialer:
    """Opens channels to one address, with the certificates that are there at the time."""

    def __init__(self, address: str, options: Options, files: Files) -> None:
        self.address = address
        self._options = options
        self._files = files
        self._shown: grpc.ChannelCredentials | None = None

    @property
    def max_message_bytes(self) -> int:
        """Of a message that is sent."""
        return int(dict(self._options)["grpc.max_send_message_length"])

    @property
    def is_stale(self) -> bool:
        """Whether the certificates have changed since a channel was opened: gRPC goes on with the
        old ones for as long as a channel lives."""
        return self._files is not None and self._files.current() is not self._shown

    def open(self) -> grpc.aio.Channel:
        """With the certificates that are there now."""
        self._shown = None if self._files is None else self._files.current()
        if self._shown is None:
            return grpc.aio.insecure_channel(self.address, options=self._options)
        return grpc.aio.secure_channel(self.address, self._shown, self._options)

    async def fresh(self, channel: grpc.aio.Channel | None) -> grpc.aio.Channel:
        """`channel`, or a new one where there is none, or in its place where it is stale."""
        if channel is not None:
            if not self.is_stale:
                return channel
            await channel.close()
        return self.open()


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
