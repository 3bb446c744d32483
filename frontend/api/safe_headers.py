"""Headers of answers that keep browsers from doing more with them than showing them."""

from __future__ import annotations

Headers = list[tuple[bytes, bytes]]

_SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"x-xss-protection", b"0"),
    (b"referrer-policy", b"no-referrer"),
)
"""The filter that x-xss-protection turns off was itself a way to attack pages."""
_ONLY_TLS = (b"strict-transport-security", b"max-age=31536000")
_NOTHING = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")


def safe_headers(*, is_tls: bool) -> Headers:
    """Those of every answer; HSTS would lock browsers out of a server that has no TLS."""
    return [*_SAFE, *([_ONLY_TLS] if is_tls else [])]


def with_safe(headers: Headers, safe: Headers) -> Headers:
    """`headers`, and of the others those that it has not chosen itself. What does not say what it
    may do may do nothing at all."""
    chosen = {name for name, _ in headers}
    if b"content-security-policy" not in chosen:
        headers.append(_NOTHING)
    headers += [pair for pair in safe if pair[0] not in chosen]
    return headers
