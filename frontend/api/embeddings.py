"""POST /v1/embeddings, in OpenAI's shapes."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt
from starlette.responses import Response

from frontend.api.bodies import read_body
from frontend.api.document import documented
from frontend.api.http import JsonResponse, unless_gone
from frontend.api.openai_request import parse
from frontend.api.openai_schema import Body, Int32
from frontend.desk import FrontDesk
from frontend.messages import Usage
from frontend.pooling import PoolWalk
from frontend.request import PoolInput, PoolRequest

INSTEAD_OF_TEXTS = MappingProxyType({"texts": "input", "inputs": "input", "prompt": "input"})


class PoolBody(Body):
    """What all bodies of pooled inputs have in common."""

    model: str | None = None
    truncate_prompt_tokens: StrictInt | None = None
    """Keep this many leading tokens of every input, special ones included (of a pair the second
    text is cut); -1: as many as the context holds. Longer inputs are refused without it."""
    priority: Int32 | None = None
    """Higher runs sooner."""
    user: str | None = None
    """Whom the client serves; written to the request's log line, and without any other effect."""


class EmbeddingsBody(PoolBody):
    """POST /v1/embeddings."""

    other_names: ClassVar[Mapping[str, str]] = INSTEAD_OF_TEXTS
    not_served: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType(
        {"messages": (), "embed_dtype": ("float32",), "endianness": ("native", "little")}
    )

    input: str | list[str] | list[StrictInt] | list[list[StrictInt]]
    """A text, token ids, or a list of either, of at most 1,024."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: little-endian float32."""
    dimensions: Annotated[Int32, Field(ge=1)] | None = None
    """Leading features to keep, cut off before the vector is normalised."""
    normalize: StrictBool | None = None
    """false: the vector keeps its length."""


def embeddings_routes(desk: FrontDesk) -> APIRouter:
    """The router."""
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=documented(EmbeddingsBody))
    async def create_embeddings(request: Request) -> Response:
        """A vector for every input."""
        body = parse(await read_body(request, desk.config.max_body_bytes), EmbeddingsBody)
        asked = PoolRequest(
            inputs=to_inputs(body.input),
            dimensions=body.dimensions,
            normalize=body.normalize,
            **common(body),
        )
        walk = PoolWalk(desk, asked, request.state.ingress)
        vectors, usage, model = await unless_gone(request.receive, walk.run())
        entries = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body)}
            for index, vector in enumerate(vectors)
        ]
        return JsonResponse(
            {"object": "list", "data": entries, "model": model, "usage": pooled_usage(usage)}
        )

    return router


def common(body: PoolBody) -> dict[str, Any]:
    """The fields of a PoolRequest that all bodies give."""
    return {
        "model": body.model or "",
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "priority": body.priority or 0,
        "user": body.user or "",
    }


def pooled_usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object of requests that generate nothing."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def to_inputs(given: str | list[str] | list[int] | list[list[int]]) -> tuple[PoolInput, ...]:
    """One input or several, whichever way they were written."""
    if isinstance(given, str):
        return (given,)
    ids = tuple(one for one in given if isinstance(one, int))
    if ids:
        return (ids,)
    return tuple(tuple(one) if isinstance(one, list) else str(one) for one in given)


def _written(vector: array[float], body: EmbeddingsBody) -> str | list[float]:
    if body.encoding_format != "base64":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
