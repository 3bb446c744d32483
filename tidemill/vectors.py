"""Embeddings, scores and ranks as `tidemill.Client` asks for them, as plain values.

It does not know gRPC; the clients lend the method that makes a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from tidemill.conversation import Fields
from tidemill.exchange import CallOptions, checked_options
from tidemill.given import ids_of, several, wrong_kind
from tidemill.runtime.errors import InvalidRequest

_READ = ("model", "timeout_s", "request_id", "priority", "fairness_key", "traceparent")
"""The options that mean something where nothing is generated."""

Input = str | Sequence[int]
"""A text, or token ids."""

_WORDING = "a text, token ids, or a list of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """One vector per input, in their order."""

    vectors: list[list[float]]
    usage: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One number per pair, in their order; the higher, the better the texts go together."""

    scores: list[float]
    usage: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document by its index, and how well it fits the query."""

    index: int
    score: float


class PoolCalls(ABC):
    """The blocking methods."""

    @abstractmethod
    def _pooled(self, method: str, given: Fields, options: CallOptions | None) -> Any:
        """The response of a method to a request of these fields."""

    def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        options: CallOptions | None = None,
    ) -> Embeddings:
        """A vector for every text or list of token ids. Raises ServiceError.

        `dimensions` keeps that many leading features, of vectors of length 1 unless `normalize` is
        False; `truncate_prompt_tokens` that many leading tokens, -1: what the context holds.
        """
        given = _embed_fields(inputs, dimensions, normalize, truncate_prompt_tokens)
        return _to_embeddings(self._pooled("Embed", _with(given, options), options))

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate_prompt_tokens: int | None = None,
        options: CallOptions | None = None,
    ) -> Scores:
        """How well the texts of every pair go together. Raises ServiceError."""
        given = _score_fields(pairs, truncate_prompt_tokens)
        return _to_scores(self._pooled("Score", _with(given, options), options))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
        options: CallOptions | None = None,
    ) -> list[Ranked]:
        """The documents that fit the query best, the best one first. Raises ServiceError."""
        given = _rerank_fields(query, documents, top_n, truncate_prompt_tokens)
        return _to_ranks(self._pooled("Rerank", _with(given, options), options))


class AsyncPoolCalls(ABC):
    """The same for asyncio."""

    @abstractmethod
    async def _pooled(self, method: str, given: Fields, options: CallOptions | None) -> Any:
        """The response of a method to a request of these fields."""

    async def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        options: CallOptions | None = None,
    ) -> Embeddings:
        """A vector for every text or list of token ids. Raises ServiceError."""
        given = _embed_fields(inputs, dimensions, normalize, truncate_prompt_tokens)
        return _to_embeddings(await self._pooled("Embed", _with(given, options), options))

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate_prompt_tokens: int | None = None,
        options: CallOptions | None = None,
    ) -> Scores:
        """How well the texts of every pair go together. Raises ServiceError."""
        given = _score_fields(pairs, truncate_prompt_tokens)
        return _to_scores(await self._pooled("Score", _with(given, options), options))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
        options: CallOptions | None = None,
    ) -> list[Ranked]:
        """The documents that fit the query best, the best one first. Raises ServiceError."""
        given = _rerank_fields(query, documents, top_n, truncate_prompt_tokens)
        return _to_ranks(await self._pooled("Rerank", _with(given, options), options))


def as_inputs(inputs: Input | Sequence[Input]) -> list[Input]:
    """Several inputs, whichever way one or many were given."""
    if isinstance(inputs, str):
        return [inputs]
    listed: list[Any] = list(several("inputs", inputs, _WORDING))
    is_one = bool(listed) and all(isinstance(one, Integral) for one in listed)  # numpy's too
    return [listed] if is_one else listed


def input_ids(given: Sequence[int]) -> list[int]:
    """One input that is no text. Raises InvalidRequest where it is no list of token ids either."""
    return ids_of("inputs", given, _WORDING)


def _embed_fields(
    inputs: Input | Sequence[Input],
    dimensions: int | None,
    normalize: bool | None,
    keep: int | None,
) -> Fields:
    listed = [
        {"text": one} if isinstance(one, str) else {"tokens": {"token_ids": input_ids(one)}}
        for one in as_inputs(inputs)
    ]
    return {
        "inputs": listed,
        "dimensions": dimensions,
        "normalize": normalize,
        "truncate_prompt_tokens": keep,
    }


def _score_fields(pairs: Sequence[tuple[str, str]], keep: int | None) -> Fields:
    listed = [_pair(i, pair) for i, pair in enumerate(several("pairs", pairs, "a list of pairs"))]
    return {"pairs": listed, "truncate_prompt_tokens": keep}


def _pair(index: int, pair: tuple[str, str]) -> Fields:
    name = f"pairs[{index}]"
    texts = list(several(name, pair, "two texts"))
    if len(texts) != 2:
        raise wrong_kind(name, pair, "two texts")
    return {"left": texts[0], "right": texts[1]}


def _rerank_fields(
    query: str, documents: Sequence[str], top_n: int | None, keep: int | None
) -> Fields:
    return {
        "query": query,
        "documents": list(several("documents", documents, "a list of texts")),
        "top_n": top_n,
        "truncate_prompt_tokens": keep,
    }


def _with(given: Fields, options: CallOptions | None) -> Fields:
    """With the model; raises InvalidRequest for options that would not be heeded."""
    if options is None:
        return given
    unset, options = CallOptions(), checked_options(options)
    for one in fields(CallOptions):
        if one.name not in _READ and getattr(options, one.name) != getattr(unset, one.name):
            raise InvalidRequest(
                f"{one.name} is of texts that are generated; leave it out", param=one.name
            )
    return {**given, "model": options.model}


def _to_embeddings(answer: Any) -> Embeddings:
    return Embeddings(vectors=[list(one.values) for one in answer.embeddings], usage=answer.usage)


def _to_scores(answer: Any) -> Scores:
    return Scores(scores=list(answer.scores), usage=answer.usage)


def _to_ranks(answer: Any) -> list[Ranked]:
    return [Ranked(index=one.index, score=one.relevance_score) for one in answer.results]
