"""Whom a run asks, and how: addresses, keys, and what all its requests share."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidemill.bench.traffic.answer import Answer
from tidemill.bench.traffic.asked import Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Pickled for the client processes; never written to a file."""

    urls: tuple[str, ...]
    is_grpc: bool
    is_chat: bool
    model: str
    temperature: float
    ignore_eos: bool
    timeout_s: float
    """Of one request, from when it was due."""
    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None


class Face(Protocol):
    """One server, over one protocol."""

    def write(self, asked: Asked) -> Any: ...

    async def ask(self, content: Any, answer: Answer) -> None: ...

    async def close(self) -> None: ...


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Trusts the certificates in `ca_file` (PEM), or else those of the system."""
    return ssl.create_default_context(cafile=ca_file)
