"""Pages of other origins: Starlette's middleware as the flags ask for it."""

from __future__ import annotations

import logging
import re
from typing import Any

from frontend.config import FrontendConfig
from tidemill.runtime.errors import InvalidRequest

_LOG = logging.getLogger("tidemill.frontend.http")
_READABLE = (
    "retry-after",
    "retry-after-ms",
    "request-id",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Of an answer's headers, beside those that pages may always read."""
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@*\sA-Z]+")
"""As browsers send it (RFC 6454): without a path, in small letters."""
_METHOD = re.compile(r"\*|[A-Z]+")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, 5.1."""


def cors_options(config: FrontendConfig) -> dict[str, Any] | None:
    """Arguments of CORSMiddleware; None: pages of other origins are not served.

    Warns of origins that anybody has. Raises InvalidRequest for what is no origin, no method or no
    header, and for any origin with credentials: it would let every page of the web act for whoever
    looks at it.
    """
    origins = _listed(config.cors_origins)
    if not origins:
        return None
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise InvalidRequest(
                f"cors_origins has {origin!r}, which no page is of; an origin is a scheme, a host "
                "and maybe a port, as https://app.example or http://localhost:3000, or * for all",
                param="cors_origins",
            )
    methods, headers = _listed(config.cors_methods), _listed(config.cors_headers)
    _check("cors_methods", methods, _METHOD, "a method, as POST in capital letters, or * for all")
    _check("cors_headers", headers, _HEADER, "the name of a header, or * for all")
    if "*" in origins:
        if config.cors_credentials:
            raise InvalidRequest(
                "cors_credentials needs cors_origins that are named, not *: every page of the web "
                "could act for whoever looks at it",
                param="cors_credentials",
            )
        _LOG.warning(
            "--cors-origins *: pages of any origin may call this server from their visitors' "
            "browsers; name the origins instead"
        )
    return {
        "allow_origins": origins,
        "allow_methods": methods,
        "allow_headers": headers,
        "allow_credentials": config.cors_credentials,
        "expose_headers": _READABLE,
    }


def _check(param: str, words: list[str], form: re.Pattern[str], what: str) -> None:
    """Every answer to a browser's first question bears these words: it would fail, or be a no."""
    for word in words:
        if not form.fullmatch(word):
            raise InvalidRequest(f"{param} has {word!r}, which is not {what}", param=param)


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
