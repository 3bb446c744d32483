"""Whom a run asks, and how: addresses, keys, and what all its requests share."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from tidemill.bench.traffic.answer import Answer
from tidemill.bench.traffic.asked import Asked
from tidemill.security.client_tls import ClientTls


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Pickled for the client processes; never written to a file."""

    urls: tuple[str, ...]
    """http or https; TLS with gRPC too."""
    is_grpc: bool
    is_chat: bool
    model: str
    temperature: float
    ignore_eos: bool
    timeout_s: float
    """Of one request, from when it was due."""
    api_key: str | None = field(default=None, repr=False)
    tls: ClientTls = field(default_factory=ClientTls)

    def tls_of(self, url: str) -> ClientTls | None:
        """How a connection to this address is made sure of; None: not at all."""
        return self.tls if urlsplit(url).scheme == "https" else None

    def context_of(self, url: str) -> ssl.SSLContext | None:
        """The same for HTTP. Raises FailedPrecondition naming files that do not serve."""
        if (tls := self.tls_of(url)) is None:
            return None
        tls.credentials()  # names what is wrong with the files
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
        return context


class Face(Protocol):
    """One server, over one protocol."""

    def write(self, asked: Asked) -> Any: ...

    async def ask(self, content: Any, answer: Answer) -> None: ...

    async def close(self) -> None: ...
