"""What a server shows of itself and whom it lets in: TLS and mTLS for gRPC and for HTTP.

Certificates are looked at again at every handshake, so a renewed one serves the next connection;
those that stand keep theirs. It does not know what is served.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import NamedTuple

import grpc

from tidemill.runtime.errors import FailedPrecondition
from tidemill.security.tls_flags import TlsFlags, check_server_flags
from tidemill.security.watched import Watched

_LOG = logging.getLogger("tidemill.security")


class _Connection(ssl.SSLObject):
    """Says why it lets nobody in: the client is not told, because asyncio and uvloop reset what
    fails before they have sent its alert."""

    def do_handshake(self) -> None:
        """Raises ssl.SSLError."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as failure:
            why = getattr(failure, "verify_message", None) or failure.reason
            _LOG.info("a client's TLS handshake failed: %s", why)
            raise


class _Material(NamedTuple):
    """One state of the files."""

    grpc: grpc.ServerCertificateConfiguration
    http: ssl.SSLContext


class ServerTls:
    """The certificates of one server. Raises FailedPrecondition naming the flag at fault."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        """`client_ca`: callers must show a certificate that it signed (mTLS)."""
        self._paths = (cert, key, *([client_ca] if client_ca else []))
        self._is_mutual = client_ca is not None
        try:
            self._files = Watched(self._paths, self._load)
        except (OSError, ValueError) as failure:
            flags = "--tls-cert, --tls-key" + ", --tls-client-ca" * self._is_mutual
            raise FailedPrecondition(
                f"cannot use the certificates {', '.join(self._paths)}: {failure}; {flags} name "
                "PEM files: the certificate with its chain, its key without a passphrase, and "
                "the CAs of clients",
                reason="TLS_FILES",
                param="tls_cert",
            ) from failure

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For one gRPC port; make new ones for each."""
        given = self._files.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            before, given = given, self._files.current()
            return None if given is before else given.grpc

        return grpc.dynamic_ssl_server_credentials(given.grpc, renewed, self._is_mutual)

    def http_context(self) -> ssl.SSLContext:
        """For an HTTP server. The context hands each handshake to the newest one."""
        outer = self._context()

        def follow(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._files.current().http

        outer.sni_callback = follow  # called without a name as well
        outer.sslobject_class = _Connection
        return outer

    def _load(self) -> _Material:
        before = self._contents()
        context = self._context()  # also checks that the key fits and that all is PEM
        if self._contents() != before:
            raise ValueError("the files changed while they were read")
        chain, key, *client_ca = before
        config = grpc.ssl_server_certificate_configuration(
            [(key, chain)], client_ca[0] if client_ca else None
        )
        return _Material(config, context)

    def _contents(self) -> list[bytes]:
        return [Path(path).read_bytes() for path in self._paths]

    def _context(self) -> ssl.SSLContext:
        cert, key, *client_ca = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(cert, key, password=_no_passphrase)
        if client_ca:
            # A resumed session is not asked for its certificate again; TLS 1.3 resumes by tickets
            # alone, so without any a CA that was taken out lets nobody in.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
            context.load_verify_locations(client_ca[0])
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def server_tls(flags: TlsFlags) -> ServerTls | None:
    """What the flags ask for, None for plaintext. Raises FailedPrecondition."""
    check_server_flags(flags)
    if flags.tls_cert is None or flags.tls_key is None:
        return None
    return ServerTls(flags.tls_cert, flags.tls_key, flags.tls_client_ca)


def port_credentials(tls: ServerTls | None) -> grpc.ServerCredentials | None:
    """New ones for one port, None for plaintext. Two ports must not share theirs: what changed is
    told once, to the port that asks first."""
    return None if tls is None else tls.grpc_credentials()


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
