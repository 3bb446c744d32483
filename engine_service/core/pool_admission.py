"""Turns what a caller wants of hidden states into a checked request, or raises the reason why not.

`Reception` stands ahead of both admissions: a model may have either, or both.
"""

from __future__ import annotations

from typing import Protocol

from engine_service.core.admission import Admission, Admitted, Capacity
from engine_service.core.checks import check_whole, read_token_ids
from engine_service.core.messages import Submit
from engine_service.core.params import (
    POOLING_KINDS,
    PoolChoice,
    PoolFacts,
    PoolingParams,
    ResolvedSampling,
)
from engine_service.core.pooling import Pooling
from engine_service.core.strategy import ModelFacts
from tidemill.runtime.errors import InvalidRequest, Unsupported

NOTHING_SAMPLED = ResolvedSampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={},
    seed=0,
    choice=0,
    max_tokens=0,
    min_tokens=0,
    stop_token_ids=frozenset(),
    stop_token_sequences=(),
    suppress=(),
    logprobs=None,
    prompt_logprobs=None,
)
"""What is sampled of a prompt that is pooled."""


class Admits(Protocol):
    """What the scheduler asks of an admission."""

    def admit(self, submit: Submit) -> Admitted:
        """Raises InvalidRequest or Unsupported; the error's `param` names the field."""


class Reception:
    """Sends every request to the admission that knows its kind.

    `generation` is None for encoders, `pooling` where nothing is computed.
    """

    def __init__(
        self, *, architecture: str, generation: Admission | None, pooling: PoolAdmission | None
    ) -> None:
        self._architecture = architecture
        self._generation = generation
        self._pooling = pooling

    def admit(self, submit: Submit) -> Admitted:
        """Raises Unsupported for what the model cannot do."""
        if submit.pool is not None:
            if self._pooling is None:
                raise Unsupported("the simulated executor has no hidden states", param="task")
            return self._pooling.admit(submit)
        if self._generation is None:
            raise Unsupported(
                f"{self._architecture} is an encoder and generates no tokens; use it for "
                "embeddings, scores or reranking",
                reason="NOT_A_GENERATOR",
                param="model",
            )
        return self._generation.admit(submit)


class PoolAdmission:
    """Fills defaults and checks every value. Stateless between requests."""

    def __init__(
        self, *, model: ModelFacts, capacity: Capacity, mask_block: int, facts: PoolFacts
    ) -> None:
        self._model = model
        self._capacity = capacity
        self._facts = facts
        self._strategy = Pooling(mask_block)
        self._reusing = Pooling(mask_block, reuses=True)

    def admit(self, submit: Submit) -> Admitted:
        """Raises InvalidRequest or Unsupported; the error's `param` names the field."""
        assert submit.pool is not None, "not a request to pool"
        token_ids = read_token_ids("prompt_token_ids", submit.prompt, self._model.vocab_size)
        params = self._resolve(submit.pool)
        strategy = self._reusing if params.kind == "last" else self._strategy
        self._check_length(len(token_ids), strategy, params)
        start = submit.pool.pair_start
        if start is not None and self._facts.num_segments > 1:
            check_whole("pair_start", start, low=1, high=len(token_ids) - 1)
            # A token of the second text is a token of its own (models/bert.py).
            second = (token + self._model.vocab_size for token in token_ids[start:])
            token_ids = [*token_ids[:start], *second]
        return Admitted(token_ids, strategy, params, NOTHING_SAMPLED, ())

    def _resolve(self, asked: PoolChoice) -> PoolingParams:
        if asked.task != "embed":
            return self._resolve_head(asked)
        facts = self._facts
        if facts.refusal:
            raise Unsupported(facts.refusal, param="model")
        kind = asked.kind or facts.kind
        if kind not in POOLING_KINDS:
            raise InvalidRequest(
                f"pooling is {kind!r}; it must be one of {', '.join(POOLING_KINDS)}",
                param="pooling",
            )
        check_whole("dimensions", asked.dimensions, low=1, high=facts.dimensions)
        return PoolingParams(
            kind=kind,
            normalize=facts.normalize if asked.normalize is None else asked.normalize,
            dimensions=asked.dimensions or facts.dimensions,
        )

    def _resolve_head(self, asked: PoolChoice) -> PoolingParams:
        facts = self._facts
        if not facts.num_labels:
            raise Unsupported(
                f"{facts.architecture} has no classification head; ask for embeddings",
                param="task",
            )
        if asked.task == "score" and facts.num_labels != 1:
            raise Unsupported(
                f"a score needs a head of one label, and that of {facts.architecture} has "
                f"{facts.num_labels}; ask for their probabilities (classify)",
                param="task",
            )
        for name in ("kind", "normalize", "dimensions"):
            if getattr(asked, name) is not None:
                raise InvalidRequest(
                    f"{name} is of embeddings, and the task is {asked.task}; leave it out",
                    param="pooling" if name == "kind" else name,
                )
        return PoolingParams(kind="cls", classifies=True)

    def _check_length(self, num_tokens: int, strategy: Pooling, params: PoolingParams) -> None:
        limit, capacity = self._model.max_model_len, self._capacity
        if num_tokens > limit:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens. However, your input has "
                f"{num_tokens}. Please reduce its length.",
                reason="CONTEXT_LENGTH_EXCEEDED",
                param="prompt_token_ids",
                facts={"n_prompt_tokens": str(num_tokens), "n_ctx": str(limit)},
            )
        needs = strategy.needs(num_tokens, num_tokens, params)
        slots = capacity.num_pages * capacity.page_size
        for flag, limit, needed in (
            ("--token-budget", capacity.token_budget, needs.tokens),
            ("--num-pages", slots, needs.positions),
        ):
            if needed > limit:
                raise InvalidRequest(
                    f"an input of {num_tokens} tokens needs room for {needed} at once, and the "
                    f"engine's {flag} gives {limit}; shorten it or raise {flag}",
                    reason="BUDGET_TOO_SMALL",
                    param="prompt_token_ids",
                )
