"""Embed, Score and Rerank of TextService. They do not know how a vector is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from frontend.api.grpc_text_convert import Metadata, priority_of, usage_message
from frontend.api.rerank import best_first
from frontend.desk import FrontDesk
from frontend.pooling import PoolResult, PoolWalk, pairs_of, score_pairs
from frontend.request import Ingress, PoolInput, PoolRequest, TextPair
from tidemill.v1 import text_pb2 as pb


class PoolMethods(ABC):
    """The methods that pool hidden states, for TextServicer."""

    _desk: FrontDesk

    @abstractmethod
    def _ingress(
        self, method: str, context: Any
    ) -> AbstractContextManager[tuple[Ingress, Metadata]]:
        """The call's id, deadline and span, around its work."""

    async def Embed(self, request: Any, context: Any) -> Any:
        """A vector for every input."""
        with self._ingress("Embed", context) as (ingress, metadata):
            wanted = to_embed_request(request, metadata)
            result = await PoolWalk(self._desk, wanted, ingress).run()
        embeddings = [
            pb.Embedding(index=index, values=vector) for index, vector in enumerate(result.vectors)
        ]
        return pb.EmbedResponse(embeddings=embeddings, usage=usage_message(result.usage))

    async def Score(self, request: Any, context: Any) -> Any:
        """A number for every pair."""
        result = await self._score("Score", to_score_request, request, context)
        scores = [vector[0] for vector in result.vectors]
        return pb.ScoreResponse(scores=scores, usage=usage_message(result.usage))

    async def Rerank(self, request: Any, context: Any) -> Any:
        """The documents in the order in which they fit the query."""
        result = await self._score("Rerank", to_rerank_request, request, context)
        scores = [vector[0] for vector in result.vectors]
        top_n = request.top_n if request.HasField("top_n") else None
        ranked = [
            pb.RankedDocument(index=index, relevance_score=scores[index])
            for index in best_first(scores, top_n)
        ]
        return pb.RerankResponse(results=ranked, usage=usage_message(result.usage))

    async def _score(
        self, method: str, read: Callable[[Any, Metadata], PoolRequest], request: Any, context: Any
    ) -> PoolResult:
        with self._ingress(method, context) as (ingress, metadata):
            return await score_pairs(self._desk, read(request, metadata), ingress)


def to_embed_request(request: pb.EmbedRequest, metadata: Metadata) -> PoolRequest:
    """The request behind Embed."""
    inputs: list[PoolInput] = [
        tuple(one.tokens.token_ids) if one.WhichOneof("content") == "tokens" else one.text
        for one in request.inputs
    ]
    return PoolRequest(
        inputs=tuple(inputs),
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=request.normalize if request.HasField("normalize") else None,
        param="inputs",
        **_common(request, metadata),
    )


def to_score_request(request: pb.ScoreRequest, metadata: Metadata) -> PoolRequest:
    """The request behind Score."""
    pairs = tuple(TextPair(pair.left, pair.right) for pair in request.pairs)
    return PoolRequest(inputs=pairs, param="pairs", **_common(request, metadata))


def to_rerank_request(request: pb.RerankRequest, metadata: Metadata) -> PoolRequest:
    """The request behind Rerank; `top_n` shapes the answer only."""
    pairs = pairs_of(request.query, request.documents)
    return PoolRequest(inputs=pairs, param="documents", **_common(request, metadata))


def _common(request: Any, metadata: Metadata) -> dict[str, Any]:
    """The fields of a PoolRequest that all messages give."""
    name = "truncate_prompt_tokens"
    return {
        "model": request.model,
        name: getattr(request, name) if request.HasField(name) else None,
        "priority": priority_of(metadata),
    }
