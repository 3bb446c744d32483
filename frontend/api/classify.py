"""/classify in vLLM's shapes: what a classifier says of texts, a probability per label."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import StrictInt
from starlette.responses import Response

from frontend.api.bodies import read_body
from frontend.api.document import documented
from frontend.api.embeddings import PoolBody, common, pooled_usage, to_inputs
from frontend.api.http import JsonResponse, unless_gone
from frontend.api.openai_request import parse
from frontend.desk import FrontDesk
from frontend.pooling import PoolWalk
from frontend.request import PoolRequest
from frontend.served import likeliest


class ClassifyBody(PoolBody):
    """POST /classify."""

    not_served: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType(
        {"activation": (True,), "use_activation": (True,), "messages": ()}
    )

    input: str | list[str] | list[StrictInt] | list[list[StrictInt]]
    """A text, token ids, or a list of either, of at most 1,024."""


def classify_routes(desk: FrontDesk) -> APIRouter:
    """The router."""
    router = APIRouter()

    async def classify(request: Request) -> Response:
        """The probabilities of the labels, and the likeliest label, of every input."""
        body = parse(await read_body(request, desk.config.max_body_bytes), ClassifyBody)
        asked = PoolRequest(inputs=to_inputs(body.input), task="classify", **common(body))
        ingress = request.state.ingress
        labels = desk.model_for(asked.model).labels
        walk = PoolWalk(desk, asked, ingress)
        vectors, usage, model = await unless_gone(request.receive, walk.run())
        return JsonResponse(
            {
                "id": f"classify-{ingress.request_id}",
                "object": "list",
                "created": ingress.created,
                "model": model,
                "data": [
                    {"index": index, **_told(vector.tolist(), labels)}
                    for index, vector in enumerate(vectors)
                ],
                "usage": pooled_usage(usage),
            }
        )

    for path in ("/classify", "/v1/classify"):
        router.post(path, openapi_extra=documented(ClassifyBody))(classify)
    return router


def _told(probs: list[float], labels: Mapping[int, str]) -> dict[str, Any]:
    return {"label": likeliest(probs, labels), "probs": probs, "num_classes": len(probs)}
