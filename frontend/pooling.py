"""One request for embeddings or scores: inputs -> token ids -> engine -> vectors, for both faces.

It does not know HTTP or gRPC messages; it owns the request from admission to its log line.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from frontend.engine_convert import pack_ids
from frontend.engine_pool import PoolPrompt
from frontend.fleet.route import Route
from frontend.messages import Usage
from frontend.observation import error_type, inner_span
from frontend.request import Ingress, PoolInput, PoolRequest, TextPair
from frontend.validation import MAX_PROMPTS, check_ids, context_exceeded
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.telemetry import semconv
from tidemill.telemetry.tracer import Span

if TYPE_CHECKING:
    from frontend.desk import FrontDesk

_LOG = logging.getLogger("tidemill.frontend.request")
_AT_ONCE = 64
"""Inputs of one request that the engine has at a time: enough for full steps, and a request of
many inputs does not fill the engine's queue."""
_MAX_USER_CHARS = 128
_BYTES_PER_TOKEN = 4


class PoolResult(NamedTuple):
    """A float32 vector per input, in their order, and what they cost together."""

    vectors: list[array[float]]
    usage: Usage
    model: str


class PoolWalk:
    """Use once: `await PoolWalk(desk, request, ingress).run()`. Cancelling it aborts its inputs."""

    def __init__(
        self, desk: FrontDesk, request: PoolRequest, ingress: Ingress, most: int = MAX_PROMPTS
    ) -> None:
        """For up to `most` inputs."""
        self._desk = desk
        self._request = request
        self._ingress = ingress
        self._most = most
        self._model = desk.model_for(request.model)
        self._span: Span | None = None

    async def run(self) -> PoolResult:
        """Raises the request's ServiceError; one input that fails ends the others."""
        self._desk.entered(self)
        try:
            self._desk.fleet.check_room(self._ingress.caller, self._request.priority)
            self._check()
            with inner_span(self._ingress, "tokenize"):
                prompts = [await self._encode(one) for one in self._request.inputs]
            if self._ingress.use is not None:
                self._ingress.use(sum(len(one.packed) for one in prompts) // _BYTES_PER_TOKEN)
            self._span = self._ingress.span.child(f"embeddings {self._model.name}", kind="CLIENT")
            result = await self._ask(prompts)
        except BaseException as failure:
            self._ended(Usage(), failure)
            raise
        finally:
            self._desk.left(self)
        self._ended(result.usage, None)
        return result

    def _check(self) -> None:
        request, facts = self._request, self._model.facts
        if request.task not in facts.pool_tasks:
            raise Unsupported(
                f"the model {self._model.name!r} does not serve {request.task}; it serves "
                f"{', '.join((*facts.methods, *facts.pool_tasks)) or 'nothing of the kind'}",
                param="model",
            )
        if not 1 <= len(request.inputs) <= self._most:
            raise InvalidRequest(
                f"{request.param} has {len(request.inputs)} entries; send 1 to {self._most} in "
                "one request",
                param=request.param,
            )
        most = facts.embedding_size
        if request.dimensions is not None and not 1 <= request.dimensions <= most:
            raise InvalidRequest(
                f"dimensions is {request.dimensions}; an embedding of this model has {most}, of "
                f"which 1 to {most} can be kept",
                param="dimensions",
            )
        keep = request.truncate_prompt_tokens
        if keep is not None and keep < 1 and keep != -1:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {keep}; it must be at least 1, or -1 for what the "
                "context holds",
                param="truncate_prompt_tokens",
            )

    async def _encode(self, given: PoolInput) -> PoolPrompt:
        request, model = self._request, self._model
        limit, keep = model.facts.max_model_len, request.truncate_prompt_tokens
        keep = limit if keep == -1 else keep
        pair_start = None
        if isinstance(given, tuple) and not isinstance(given, TextPair):
            token_ids = list(given[:keep])
            if len(token_ids) <= limit:  # more are refused below, without a look at each of them
                check_ids(request.param, token_ids, model.facts.vocab_size)
        else:
            left, right = given if isinstance(given, TextPair) else (given, None)
            if "" in (left, right):
                raise InvalidRequest(
                    f"{request.param} has an empty text; it needs at least one character",
                    param=request.param,
                )
            size = len(left) + len(right or "")
            least = model.tokenizer.least_tokens(left) + model.tokenizer.least_tokens(right or "")
            if keep is None and least > limit:
                raise context_exceeded(request.param, least, 0, limit, is_exact=False)
            encode = partial(model.tokenizer.encode_input, left, right)
            token_ids, pair_start = await self._desk.pool.run(
                encode, size=size, keep=keep, param=request.param
            )
        if not token_ids:
            raise InvalidRequest(
                f"{request.param} is empty; it needs at least one token", param=request.param
            )
        if len(token_ids) > limit:
            raise context_exceeded(request.param, len(token_ids), 0, limit)
        return PoolPrompt(
            packed=pack_ids(token_ids),
            task=request.task,
            pair_start=pair_start,
            dimensions=request.dimensions,
            normalize=request.normalize,
            priority=request.priority,
        )

    async def _ask(self, prompts: list[PoolPrompt]) -> PoolResult:
        room = asyncio.Semaphore(_AT_ONCE)
        context = None if self._span is None else self._span.context

        async def ask(prompt: PoolPrompt) -> tuple[array[float], Usage]:
            async with room:
                session = self._ingress.session or self._request.user
                facts = self._model.facts
                route = Route(self._desk.fleet, facts, session, self._ingress.caller)
                return await route.pool(
                    prompt,
                    request_id=self._ingress.request_id,
                    remaining_ms=self._remaining_ms,
                    trace=context,
                )

        tasks = [asyncio.ensure_future(ask(prompt)) for prompt in prompts]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        usage = Usage(*map(sum, zip(*(usage for _, usage in answers), strict=True)))
        name = self._model.called(self._request.model)
        return PoolResult([vector for vector, _ in answers], usage, name)

    def _remaining_ms(self) -> int | None:
        """At least 1, so that it is the engine that counts and answers a passed deadline."""
        if self._ingress.deadline is None:
            return None
        remaining = self._ingress.deadline - asyncio.get_running_loop().time()
        return max(1, int(1000 * remaining))

    def _ended(self, usage: Usage, failure: BaseException | None) -> None:
        """The one log line, the counters, and the end of the CLIENT span."""
        metrics, name = self._desk.metrics, self._model.name
        seconds = asyncio.get_running_loop().time() - self._ingress.received
        outcome, kind = "finished", ""
        if failure is None:
            metrics.prompt_tokens.labels(name).inc(usage.prompt_tokens)
            metrics.cached_tokens.labels(name).inc(usage.cached_tokens)
            metrics.forward_passes.labels(name).inc(usage.forward_passes)
            metrics.num_preemptions.labels(name).inc(usage.preemptions)
            metrics.request_prompt_tokens.labels(name).observe(usage.prompt_tokens)
            metrics.e2e_latency.labels(name).observe(seconds)
        else:
            kind = error_type(failure)
            outcome = "aborted" if kind == "cancelled" else f"failed: {failure}"
            metrics.request_failure.labels(name, kind).inc()
        metrics.server.observe(
            semconv.EMBEDDINGS, name, whole_s=seconds, first_s=None, num_tokens=0, error=kind
        )
        if self._span is not None:
            attributes: semconv.Attributes = {
                semconv.OPERATION: semconv.EMBEDDINGS,
                semconv.PROVIDER: "tidemill",
                semconv.REQUEST_MODEL: self._request.model or name,
                semconv.RESPONSE_MODEL: name,
                semconv.INPUT_TOKENS: usage.prompt_tokens,
            }
            if failure is not None:
                attributes[semconv.ERROR_TYPE] = kind
            self._span.end(attributes=attributes, error=None if failure is None else outcome)
        _LOG.info(
            "request %s",
            outcome,
            extra={
                "request_id": self._ingress.request_id,
                "call": self._ingress.asked,
                "client": self._ingress.client,
                "model": name,
                "inputs": len(self._request.inputs),
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "e2e_s": round(seconds, 4),
                **self._beside(),
            },
        )

    def _beside(self) -> dict[str, str]:
        """What only some log lines have."""
        context = self._ingress.span.context
        beside = {} if context is None else context.ids
        if user := self._request.user:
            beside["user"] = user[:_MAX_USER_CHARS]
        if self._ingress.caller:
            beside["key"] = self._ingress.caller
        if num_shown := self._desk.config.log_prompts:
            beside["prompts"] = " | ".join(str(one)[:num_shown] for one in self._request.inputs)
        return beside


def pairs_of(query: str, documents: Iterable[str]) -> tuple[TextPair, ...]:
    """A query with each of the documents. Raises InvalidRequest for an empty one."""
    if not query:
        raise InvalidRequest("query is empty; it needs at least one character", param="query")
    return tuple(TextPair(query, document) for document in documents)


async def score_pairs(desk: FrontDesk, request: PoolRequest, ingress: Ingress) -> PoolResult:
    """How well the texts of every pair in `request.inputs` go together, one number each.

    A cross-encoder reads both at once; of other models it is the cosine of the embeddings, each
    text being embedded once.
    """
    model = desk.model_for(request.model)
    if "score" in model.facts.pool_tasks or "embed" not in model.facts.pool_tasks:
        return await PoolWalk(desk, replace(request, task="score"), ingress).run()
    pairs = [one for one in request.inputs if isinstance(one, TextPair)]
    assert len(pairs) == len(request.inputs), "scores are of pairs"
    if not 1 <= len(pairs) <= MAX_PROMPTS:
        raise InvalidRequest(
            f"{request.param} has {len(pairs)} entries; send 1 to {MAX_PROMPTS} in one request",
            param=request.param,
        )
    place = {text: index for index, text in enumerate(dict.fromkeys(t for p in pairs for t in p))}
    texts = replace(request, inputs=tuple(place), task="embed", normalize=True)
    vectors, usage, name = await PoolWalk(desk, texts, ingress, 2 * len(pairs)).run()
    scores = [
        array("f", [sum(map(float.__mul__, vectors[place[p.left]], vectors[place[p.right]]))])
        for p in pairs
    ]
    return PoolResult(scores, usage, name)
