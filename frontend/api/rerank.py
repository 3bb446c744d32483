"""How well texts go together: /v1/score in vLLM's shapes, /v1/rerank in Jina's and Cohere's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt
from starlette.responses import Response

from frontend.api.bodies import read_body
from frontend.api.document import documented
from frontend.api.embeddings import PoolBody, common, pooled_usage
from frontend.api.http import JsonResponse, unless_gone
from frontend.api.openai_request import parse
from frontend.api.openai_schema import Body
from frontend.desk import FrontDesk
from frontend.pooling import pairs_of, score_pairs
from frontend.request import PoolRequest, TextPair
from frontend.validation import MAX_PROMPTS
from tidemill.runtime.errors import InvalidRequest


class DocumentBody(Body):
    """A document in an object, as some clients send it."""

    text: str


class RerankBody(PoolBody):
    """POST /v1/rerank."""

    other_names: ClassVar[Mapping[str, str]] = MappingProxyType({"input": "documents"})
    not_served: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType(
        {"max_tokens_per_doc": (), "rank_fields": ([],), "max_chunks_per_doc": ()}
    )

    query: str
    documents: list[str | DocumentBody] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: StrictInt | None = Field(default=None, ge=0)
    """How many results to return, best first; 0 or left out: all."""
    return_documents: StrictBool | None = None
    """false: results do not repeat the documents."""


class ScoreBody(PoolBody):
    """POST /v1/score: a text with each of several, or texts pair by pair."""

    other_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"input": "text_1 and text_2", "query": "/v1/rerank", "documents": "/v1/rerank"}
    )

    text_1: str | list[str]
    text_2: str | list[str]


def rerank_routes(desk: FrontDesk) -> APIRouter:
    """The router."""
    router = APIRouter()

    async def rerank(request: Request) -> Response:
        """The documents in the order in which they fit the query."""
        body = parse(await read_body(request, desk.config.max_body_bytes), RerankBody)
        return await _rank(desk, body, request)

    async def score(request: Request) -> Response:
        """A number for every pair."""
        body = parse(await read_body(request, desk.config.max_body_bytes), ScoreBody)
        return await _score(desk, body, request)

    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        router.post(path, openapi_extra=documented(RerankBody))(rerank)
    for path in ("/v1/score", "/score"):
        router.post(path, openapi_extra=documented(ScoreBody))(score)
    return router


async def _rank(desk: FrontDesk, body: RerankBody, request: Request) -> Response:
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    pairs = pairs_of(body.query, texts)
    asked = PoolRequest(inputs=pairs, param="documents", **common(body))
    ingress = request.state.ingress
    work = score_pairs(desk, asked, ingress)
    vectors, usage, model = await unless_gone(request.receive, work)
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": vectors[index][0]}
        for index in best_first([vector[0] for vector in vectors], body.top_n)
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return JsonResponse(
        {
            "id": f"rerank-{ingress.request_id}",
            "model": model,
            "results": results,
            "usage": pooled_usage(usage),
        }
    )


async def _score(desk: FrontDesk, body: ScoreBody, request: Request) -> Response:
    asked = PoolRequest(inputs=_pairs(body), param="text_2", **common(body))
    ingress = request.state.ingress
    work = score_pairs(desk, asked, ingress)
    vectors, usage, model = await unless_gone(request.receive, work)
    return JsonResponse(
        {
            "id": f"score-{ingress.request_id}",
            "object": "list",
            "created": ingress.created,
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": vector[0]}
                for index, vector in enumerate(vectors)
            ],
            "usage": pooled_usage(usage),
        }
    )


def best_first(scores: list[float], top_n: int | None) -> list[int]:
    """Indices of the highest scores; of equal ones the first goes first. 0 and None: all."""
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    return ranked[: top_n or None]


def _pairs(body: ScoreBody) -> tuple[TextPair, ...]:
    left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise InvalidRequest(
            f"text_1 has {len(left)} texts and text_2 {len(right)}; text_1 must have one, or as "
            "many as text_2",
            param="text_1",
        )
    return tuple(map(TextPair, left, right))
