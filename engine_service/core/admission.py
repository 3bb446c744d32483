"""Turns what a caller asks into a checked, complete request, or raises the reason why not.

It does not know the queue or the pool's present state: only what could never work is refused here.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine_service.core.checks import (
    check_number,
    check_token_ids,
    check_whole,
    read_token_ids,
)
from engine_service.core.choosable import Choosable, choosable, is_asked
from engine_service.core.constraint import Grammars, Vocabulary
from engine_service.core.messages import Submit
from engine_service.core.params import (
    MAX_LISTED_IDS,
    DecodingChoice,
    ResolvedSampling,
    SamplingParams,
    given,
)
from engine_service.core.pinning import Pinned, num_at_end, output_through, read_pinned
from engine_service.core.strategy import DecodeStrategy, ModelFacts
from engine_service.core.support import PENALTIES, check_supported, with_defaults
from tidemill.runtime.errors import InvalidRequest, Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the engine can hold at best; a request beyond it would wait for ever."""

    num_pages: int
    page_size: int
    token_budget: int
    logit_budget: int
    span_logits: int
    """Positions that one span may decide on: the logits of a span are never split."""


class Admitted(NamedTuple):
    """A request that can run."""

    token_ids: list[int]
    strategy: DecodeStrategy
    params: Any
    sampling: ResolvedSampling
    pinned: Pinned
    choosable: Choosable = Choosable(None, None)


class Admission:
    """Fills defaults and checks every value. Stateless between requests.

    `defaults` come from the checkpoint's generation_config.json; `seed` serves requests that bring
    none (0: a fresh one for each). Without `grammars` nobody can say which tokens may be chosen.
    """

    def __init__(
        self,
        *,
        model: ModelFacts,
        capacity: Capacity,
        strategies: Mapping[str, DecodeStrategy],
        default_method: str,
        default_params: Mapping[str, Any],
        defaults: SamplingParams,
        seed: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        self._capacity = capacity
        self._strategies = dict(strategies)
        self._default_method = default_method
        self._default_params = given(default_params)
        self._defaults = defaults
        self._seed = seed
        self._eos_ids = frozenset(model.eos_token_ids)
        never = () if model.mask_token_id is None else (model.mask_token_id,)
        self._vocabulary = Vocabulary(size=model.vocab_size, never=frozenset(never))
        self._grammars = grammars
        self._choose_method(DecodingChoice())

    def admit(self, submit: Submit) -> Admitted:
        """Raises InvalidRequest or Unsupported; the error's `param` names the field."""
        token_ids = read_token_ids("prompt_token_ids", submit.prompt, self._model.vocab_size)
        strategy, params = self._choose_method(submit.decoding)
        is_stepwise = check_supported(strategy, submit)
        if is_stepwise:
            params = strategy.constrained(params, submit.decoding.params)
        asked = with_defaults(submit.sampling, self._defaults, strategy)
        self._check_values(asked)
        prompt_len, vocab_size = len(token_ids), self._model.vocab_size
        max_tokens = self._length(prompt_len, asked, strategy)
        pinned = read_pinned(
            submit.pinned, prompt_len=prompt_len, max_tokens=max_tokens, vocab_size=vocab_size
        )
        if num_given := num_at_end(pinned, prompt_len + max_tokens):
            params = params.ahead_of(num_given)
        self._check_needs(prompt_len, prompt_len + max_tokens, strategy, params)
        check_whole("min_tokens", asked.min_tokens, low=0, high=max_tokens)
        # No stop token before the last pinned one: a request cannot end inside of what it is given.
        least = max(asked.min_tokens or 0, output_through(pinned, prompt_len))
        longer = asked if least == (asked.min_tokens or 0) else replace(asked, min_tokens=least)
        sampling = self._resolve(longer, max_tokens, submit.choice)
        found = self._choosable(submit, asked, sampling)
        if found.constraint is not None:
            # It hides stop tokens itself, but where a grammar allows nothing else.
            sampling = replace(sampling, suppress=())
        return Admitted(token_ids, strategy, params, sampling, pinned, found)

    def _choosable(
        self, submit: Submit, asked: SamplingParams, sampling: ResolvedSampling
    ) -> Choosable:
        param = is_asked(asked, submit.constraint)
        if not param:
            return Choosable(None, None)
        if self._grammars is None:
            raise Unsupported(f"this engine does not serve {param}; leave it out", param=param)
        return choosable(
            asked,
            submit.constraint,
            sampling,
            self._vocabulary,
            ends=self._eos_ids,
            grammars=self._grammars,
        )

    def _choose_method(self, choice: DecodingChoice) -> tuple[DecodeStrategy, Any]:
        """The strategy and its typed knobs; the engine's default knobs belong to its own method."""
        method = choice.method or self._default_method
        strategy = self._strategies.get(method)
        if strategy is None:
            known = ", ".join(sorted(self._strategies))
            raise InvalidRequest(
                f"Unknown decoding method {method!r}; this engine knows: {known}.",
                reason="UNKNOWN_METHOD",
                param="decoding.method",
            )
        defaults = self._default_params if method == self._default_method else {}
        return strategy, strategy.parse(strategy.with_defaults(defaults, choice.params))

    def _check_values(self, asked: SamplingParams) -> None:
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            check_number(name, getattr(asked, name))
        check_whole("top_k", asked.top_k, low=-1)
        check_whole("max_tokens", asked.max_tokens, low=1)
        check_whole("min_tokens", asked.min_tokens, low=0, high=asked.max_tokens)
        check_whole("seed", asked.seed, low=0, high=2**64 - 1)
        most = self._model.max_logprobs
        check_whole("logprobs", asked.logprobs, low=0, high=most)
        check_whole("prompt_logprobs", asked.prompt_logprobs, low=0, high=most)
        self._check_ids(asked)

    def _check_ids(self, asked: SamplingParams) -> None:
        model = self._model
        vocab_size = model.vocab_size
        for name, ids, most in (
            ("stop_token_ids", asked.stop_token_ids, MAX_LISTED_IDS - len(model.eos_token_ids)),
            ("logit_bias", tuple(asked.logit_bias), MAX_LISTED_IDS),
        ):
            if len(ids) > most:
                raise InvalidRequest(
                    f"{name} has {len(ids)} entries; at most {most} are allowed.",
                    param=name,
                )
            check_token_ids(name, ids, vocab_size)
        for value in asked.logit_bias.values():
            check_number("logit_bias", value)
        for sequence in asked.stop_token_sequences:
            if not sequence:
                raise InvalidRequest(
                    "A stop sequence is empty; it needs at least one token.",
                    param="stop_token_sequences",
                )
            check_token_ids("stop_token_sequences", sequence, vocab_size)

    def _length(self, prompt_len: int, asked: SamplingParams, strategy: DecodeStrategy) -> int:
        """The output length to allow; raises when the context is too short for it."""
        limit, capacity = self._model.max_model_len, self._capacity
        if prompt_len + (asked.max_tokens or 1) > limit:
            raise _context_exceeded(prompt_len, asked.max_tokens, limit)
        block, slots = strategy.mask_block, capacity.num_pages * capacity.page_size
        room = slots // block * block or slots
        max_tokens = asked.max_tokens or max(1, min(limit, room) - prompt_len)
        if asked.max_tokens is None:
            for most in (self._defaults.max_tokens, strategy.default_max_tokens):
                max_tokens = min(max_tokens, most or max_tokens)
        return max_tokens

    def _check_needs(
        self, prompt_len: int, total: int, strategy: DecodeStrategy, params: Any
    ) -> None:
        """Raises when `total` tokens can never be computed here."""
        capacity, slots = self._capacity, self._capacity.num_pages * self._capacity.page_size
        needs = strategy.needs(prompt_len, total, params)
        if needs.tokens > capacity.token_budget:
            raise _too_small("--token-budget", capacity.token_budget, needs.tokens)
        if needs.logits > capacity.logit_budget:
            raise _too_small("--logit-budget", capacity.logit_budget, needs.logits)
        if needs.logits > capacity.span_logits:
            raise InvalidRequest(
                f"block_length decides on {needs.logits} positions at once, and this engine's "
                f"buffer for logits holds {capacity.span_logits}; pass a block_length of at most "
                f"{capacity.span_logits}.",
                param="decoding.params.block_length",
            )
        if needs.positions > slots:
            needed = -(-needs.positions // capacity.page_size)
            raise InvalidRequest(
                f"Prompt and max_tokens are {total} tokens and need {needed} KV pages of "
                f"{capacity.page_size}, but the engine has {capacity.num_pages}; lower max_tokens "
                "or raise --num-pages.",
                reason="POOL_TOO_SMALL",
                param="max_tokens",
            )

    def _resolve(self, asked: SamplingParams, max_tokens: int, choice: int) -> ResolvedSampling:
        stop_ids = frozenset(asked.stop_token_ids)
        if not asked.ignore_eos:
            # One set for most requests: every token is looked up in it, and one stays in the cache.
            stop_ids = stop_ids | self._eos_ids if stop_ids else self._eos_ids
        min_tokens = asked.min_tokens or 0
        top_k = asked.top_k or 0
        seed = asked.seed if asked.seed is not None else self._seed or secrets.randbits(63)
        return ResolvedSampling(
            temperature=_or(asked.temperature, 1.0),
            top_p=_or(asked.top_p, 1.0),
            top_k=top_k if 0 < top_k < self._model.vocab_size else 0,
            min_p=_or(asked.min_p, 0.0),
            repetition_penalty=_or(asked.repetition_penalty, 1.0),
            presence_penalty=_or(asked.presence_penalty, 0.0),
            frequency_penalty=_or(asked.frequency_penalty, 0.0),
            logit_bias=dict(asked.logit_bias),
            seed=seed,
            choice=choice,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_ids,
            stop_token_sequences=tuple(map(tuple, asked.stop_token_sequences)),
            suppress=tuple(sorted(stop_ids)) if min_tokens else (),
            logprobs=asked.logprobs,
            prompt_logprobs=asked.prompt_logprobs,
        )


def _or(value: float | None, neutral: float) -> float:
    return neutral if value is None else float(value)


def _context_exceeded(prompt_len: int, max_tokens: int | None, limit: int) -> InvalidRequest:
    asked = prompt_len + (max_tokens or 0)
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. However, you requested {asked} "
        f"tokens ({prompt_len} in the prompt, {max_tokens or 0} for the completion). Please reduce "
        "the length of the prompt or of the completion.",
        reason="CONTEXT_LENGTH_EXCEEDED",
        param="prompt_token_ids",
        facts={"n_prompt_tokens": str(prompt_len), "n_ctx": str(limit)},
    )


def _too_small(flag: str, budget: int, needed: int) -> InvalidRequest:
    return InvalidRequest(
        f"The decoding method needs {needed} in one step, but {flag} is {budget}; raise {flag} to "
        f"at least {needed}.",
        reason="BUDGET_TOO_SMALL",
        param="decoding.method",
    )
