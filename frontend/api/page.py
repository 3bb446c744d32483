"""The page at `/` that shows a generation as it happens, and what only the page asks for.

It does not know generations: the page uses the public routes like any other client.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.api.http import JsonResponse
from frontend.desk import FrontDesk
from frontend.validation import check_ids
from tidemill.runtime.errors import InvalidRequest, NotFound

_FOLDER = Path(__file__).parents[1] / "web"
_INDEX = "index.html"
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "object-src 'none'"
        ),
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)
"""Nothing but this server's own files runs, and no other page may frame this one."""
PUBLIC_PATHS = frozenset({"/", *(f"/ui/{path.name}" for path in _FOLDER.iterdir())})
"""The page itself: the same for everybody, and browsers fetch it without a key."""
_MAX_IDS = 512
_ID = re.compile(r"[0-9]{1,10}")


def page_routes(desk: FrontDesk) -> APIRouter:
    """The router. The files are read once; the page answers while the engine is away."""
    router = APIRouter(include_in_schema=False)
    files = {path.name: _File(path) for path in sorted(_FOLDER.iterdir())}

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        """The page."""
        return files[_INDEX].answer(request)

    @router.get("/ui/model")
    async def model() -> Response:
        """What the page must know of the model beside its card."""
        return JsonResponse(_facts(desk), headers=_HEADERS)

    @router.get("/ui/pieces")
    async def pieces(ids: str = "") -> Response:
        """The text of each of some tokens, for the cells of the canvas."""
        return JsonResponse({"pieces": _pieces(desk, ids)}, headers=_HEADERS)

    @router.api_route("/ui/{name}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        """A file of the page."""
        if name not in files:
            raise NotFound(f"there is no route {request.method} {request.url.path}")
        return files[name].answer(request)

    return router


class _File:
    """One file of the page, kept in memory; browsers ask each time whether it has changed."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        tag = hashlib.sha256(self._content).hexdigest()[:16]
        self._headers = {
            **_HEADERS,
            "cache-control": "no-cache",
            "content-type": _TYPES[path.suffix],
            "etag": f'"{tag}"',
        }

    def answer(self, request: Request) -> Response:
        """The file, or 304 for a browser that has it."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


def _facts(desk: FrontDesk) -> dict[str, bool | int | None]:
    """What the page must know of the model beside its card; 503 without an engine."""
    model = desk.check_ready()
    own = model.tokenizer.chat_template is not None
    return {
        "has_chat_template": own or desk.config.chat_template is not None,
        "block_length": model.facts.block_length,
        "mask_token_id": model.facts.mask_token_id,
    }


def _pieces(desk: FrontDesk, listed: str) -> list[str]:
    """The text of each token on its own, for `ids` as 1,2,3.

    Raises InvalidRequest for anything but up to 512 ids of the vocabulary.
    """
    model = desk.check_ready()
    words = listed.split(",")
    if len(words) > _MAX_IDS or not all(_ID.fullmatch(word) for word in words):
        raise InvalidRequest(
            f"ids is {listed[:40]!r}; it must be 1 to {_MAX_IDS} token ids with commas between",
            param="ids",
        )
    token_ids = [int(word) for word in words]
    check_ids("ids", token_ids, model.facts.vocab_size)
    return [model.tokenizer.piece(token_id).text for token_id in token_ids]
