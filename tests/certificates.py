"""Certificates for tests: a CA on disk and what it signs. Real ones, made by trustme."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import trustme

from tidemill.security.client_tls import ClientTls


class Pair(NamedTuple):
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """A CA; `path` is its PEM file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.path)

    def sign(self, name: str, *identities: str) -> Pair:
        """Writes NAME.crt and NAME.key, over those that are there, certificate first."""
        leaf = self._ca.issue_cert(*(identities or ("127.0.0.1", "localhost")))
        cert, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(key))
        return Pair(str(cert), str(key))

    def client(self, own: Pair | None = None) -> ClientTls:
        """What a gRPC client of a server that this CA signed uses."""
        return ClientTls(self.path, *(own or (None, None)))

    def context(self, own: Pair | None = None) -> ssl.SSLContext:
        """What an HTTP client of such a server uses."""
        context = ssl.create_default_context(cafile=self.path)
        if own is not None:
            context.load_cert_chain(*own)
        return context
