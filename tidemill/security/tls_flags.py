"""Which flags of TLS belong together. It opens no files, and does not know gRPC."""

from __future__ import annotations

from typing import Protocol

from tidemill.runtime.errors import FailedPrecondition


class TlsFlags(Protocol):
    """The fields that both services' configs have."""

    @property
    def tls_cert(self) -> str | None: ...

    @property
    def tls_key(self) -> str | None: ...

    @property
    def tls_client_ca(self) -> str | None: ...


def check_server_flags(flags: TlsFlags) -> None:
    """Raises FailedPrecondition for a certificate without its key, a key without its certificate,
    and for a CA of callers without both."""
    pair = (flags.tls_cert, flags.tls_key)
    if None in pair and (*pair, flags.tls_client_ca) != (None, None, None):
        raise FailedPrecondition(
            "TLS needs both --tls-cert and --tls-key; --tls-client-ca goes on top of them",
            reason="TLS_FILES",
            param="tls_key" if flags.tls_key is None else "tls_cert",
        )


def check_client_flags(ca: str | None, cert: str | None, key: str | None, name: str | None) -> None:
    """Raises FailedPrecondition for what a frontend shows engines that it speaks plaintext with."""
    if ca is None and (cert, key, name) != (None, None, None):
        raise FailedPrecondition(
            "--engine-tls-cert, --engine-tls-key and --engine-tls-name need --engine-tls-ca, the "
            "CA of the engine's certificate",
            reason="TLS_FILES",
            param="engine_tls_ca",
        )
