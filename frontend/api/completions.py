"""POST /v1/completions: the shapes of its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from frontend.api.chunks import ChunkWriter
from frontend.api.openai_request import to_completion
from frontend.api.openai_response import completion_logprobs, prompt_logprobs, usage_of
from frontend.api.openai_schema import CompletionBody
from frontend.api.sse import Frames
from frontend.desk import FrontDesk
from frontend.generation import Generation
from frontend.prompt_scores import PromptScores
from frontend.request import Ingress
from frontend.result import ChoiceResult
from frontend.text_delta import TextDelta, TextLogprob, with_alternatives


async def complete(desk: FrontDesk, body: CompletionBody, ingress: Ingress) -> dict[str, Any]:
    """The whole answer as one object."""
    async with desk.generation(to_completion(body), ingress) as generation:
        results = await generation.collect()
    return {
        "id": f"cmpl-{ingress.request_id}",
        "object": "text_completion",
        "created": ingress.created,
        "model": generation.called,
        "choices": [_choice(result, body, generation) for result in results],
        "usage": usage_of(generation.usage),
    }


async def stream(
    desk: FrontDesk, body: CompletionBody, ingress: Ingress
) -> AsyncGenerator[bytes, None]:
    """The answer as events; the usage chunk comes last, if it was asked for."""
    request = to_completion(body)
    async with desk.generation(request, ingress) as generation:
        frames = Frames(
            id=f"cmpl-{ingress.request_id}",
            object="text_completion",
            created=ingress.created,
            model=generation.called,
        )
        scores = PromptScores(generation.choices, request)
        writer = ChunkWriter(frames, generation, body, scores)
        async for news in generation.deltas():
            writer.news()
            if text := b"".join([_chunks(writer, delta, body) for delta in news]):
                yield text
        if last := writer.last():
            yield last


def _choice(result: ChoiceResult, body: CompletionBody, generation: Generation) -> dict[str, Any]:
    choice = {
        "index": result.index,
        "text": result.text,
        "logprobs": _logprobs(result.logprobs, body),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }
    if body.prompt_logprobs is not None:
        # The engine was asked for as many as echo's logprobs need, too.
        scores = generation.choice_at(result.index).prompt_logprobs
        choice["prompt_logprobs"] = prompt_logprobs(with_alternatives(scores, body.prompt_logprobs))
    if body.return_token_ids:
        choice["token_ids"] = result.token_ids
        choice["prompt_token_ids"] = generation.choice_at(result.index).prompt.token_ids
    return choice


def _chunks(writer: ChunkWriter, delta: TextDelta, body: CompletionBody) -> bytes:
    chunks = b"" if delta.canvas is None else writer.canvas(delta)
    scores = writer.scores.take(delta)
    is_empty = not (delta.text or delta.logprobs or delta.finish_reason or scores)
    if is_empty and not (writer.keeps_empty and delta.token_ids):
        return chunks
    choice = {
        "index": delta.index,
        "text": delta.text,
        "logprobs": _logprobs(delta.logprobs, body),
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    if scores:
        choice["prompt_logprobs"] = prompt_logprobs(scores)
    if body.return_token_ids:
        choice["token_ids"] = delta.token_ids
        if prompt := writer.prompt_of(delta.index):
            choice["prompt_token_ids"] = prompt
    return chunks + writer.chunk(choice)


def _logprobs(entries: list[TextLogprob], body: CompletionBody) -> dict[str, Any] | None:
    return None if body.logprobs is None else completion_logprobs(entries)
