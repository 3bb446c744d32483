"""Bodies of HTTP requests: how large they may be, and that they come as they are.

It does not know what is in them.
"""

from __future__ import annotations

from typing import ClassVar

from starlette.requests import Request

from tidemill.runtime.errors import InvalidRequest

_DISCARD_FACTOR = 4


class BodyTooLarge(InvalidRequest):
    """413: more bytes than the server takes."""

    http_status: ClassVar[int] = 413
    default_reason = "BODY_TOO_LARGE"


class UnsupportedCoding(InvalidRequest):
    """415: a body that would have to be unpacked, to who knows what size."""

    http_status: ClassVar[int] = 415
    default_reason = "UNSUPPORTED_CONTENT_ENCODING"


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, or BodyTooLarge as soon as it is known to be larger. Raises UnsupportedCoding.

    The rest of a moderately larger body is read and dropped, because a client that is still
    sending would see a broken connection instead of the answer.
    """
    length = request.headers.get("content-length", "")
    is_larger = length.isdecimal() and int(length) > max_bytes
    if is_larger and int(length) > _DISCARD_FACTOR * max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _DISCARD_FACTOR * max_bytes:
            raise _too_large(max_bytes)
        if size <= max_bytes:
            chunks.append(chunk)
    if size > max_bytes:
        raise _too_large(max_bytes)
    coding = request.headers.get("content-encoding", "")
    if coding.lower() not in ("", "identity"):
        raise UnsupportedCoding(
            f"the header content-encoding is {coding[:40]!r}; send the body as it is, without it",
            param="content-encoding",
        )
    return b"".join(chunks)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body is larger than {max_bytes} bytes; send less, or raise --max-body-bytes"
    )
