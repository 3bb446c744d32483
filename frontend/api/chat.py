"""POST /v1/chat/completions: the shapes of its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from frontend.api.chunks import ChunkWriter
from frontend.api.openai_request import to_chat
from frontend.api.openai_response import chat_logprobs, prompt_logprobs, usage_of
from frontend.api.openai_schema import ChatBody
from frontend.api.openai_tools import CHOICE, call_deltas, tool_calls
from frontend.api.sse import Frames
from frontend.desk import FrontDesk
from frontend.prompt_scores import PromptScores
from frontend.request import Ingress
from frontend.result import ChoiceResult
from frontend.text_delta import TextDelta


async def complete(desk: FrontDesk, body: ChatBody, ingress: Ingress) -> dict[str, Any]:
    """The whole answer as one object."""
    async with desk.generation(to_chat(body), ingress) as generation:
        results = await generation.collect()
    answer = {
        "id": f"chatcmpl-{ingress.request_id}",
        "object": "chat.completion",
        "created": ingress.created,
        "model": generation.called,
        "choices": [_choice(result, body) for result in results],
        "usage": usage_of(generation.usage),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(generation.choices[0].prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = generation.prompts[0].token_ids
    return answer


async def stream(desk: FrontDesk, body: ChatBody, ingress: Ingress) -> AsyncGenerator[bytes, None]:
    """The answer as events: role, text, finish, and the usage if it was asked for."""
    request = to_chat(body)
    async with desk.generation(request, ingress) as generation:
        frames = Frames(
            id=f"chatcmpl-{ingress.request_id}",
            object="chat.completion.chunk",
            created=ingress.created,
            model=generation.called,
        )
        scores = PromptScores(generation.choices, request)
        writer = ChunkWriter(frames, generation, body, scores)
        unsent = b""
        for choice in generation.choices:
            ids = {"prompt_token_ids": choice.prompt.token_ids} if body.return_token_ids else {}
            role = {"role": "assistant", "content": ""}
            unsent += writer.chunk(_delta(choice.index, role), **ids)
        async for news in generation.deltas():
            writer.news()
            unsent += b"".join([_chunks(writer, delta, body) for delta in news])
            if unsent:
                yield unsent
                unsent = b""
        if last := writer.last():
            yield last


def _choice(result: ChoiceResult, body: ChatBody) -> dict[str, Any]:
    # Clients take null for "calls only", one that was cut off before its name included; an empty
    # answer of any other kind stays a text.
    is_call = result.calls or CHOICE.read(body.tool_choice).mode == "required"
    content = None if is_call and not result.text else result.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if result.calls:
        message["tool_calls"] = tool_calls(result.calls)
    if result.reasoning and body.include_reasoning is not False:
        message |= _reasoning(result.reasoning)
    choice = {
        "index": result.index,
        "message": message,
        "logprobs": chat_logprobs(result.logprobs) if body.logprobs else None,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = result.token_ids
    return choice


def _chunks(writer: ChunkWriter, delta: TextDelta, body: ChatBody) -> bytes:
    """The text of a delta and its finish are two chunks: the finish has an empty delta."""
    chunks = b"" if delta.canvas is None else writer.canvas(delta)
    scores = writer.scores.take(delta) if delta.index == 0 else []
    beside = {"prompt_logprobs": prompt_logprobs(scores)} if scores else {}
    news = _news(delta, body)
    if news or delta.logprobs or scores or (writer.keeps_empty and delta.token_ids):
        choice = _delta(delta.index, news or {"content": ""})
        if body.logprobs:
            choice["logprobs"] = chat_logprobs(delta.logprobs)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        chunks += writer.chunk(choice, **beside)
    if delta.finish_reason is not None:
        choice = _delta(delta.index, {}, delta.finish_reason)
        chunks += writer.chunk({**choice, "stop_reason": delta.stop_reason})
    return chunks


def _news(delta: TextDelta, body: ChatBody) -> dict[str, Any]:
    """What a delta says, in the fields of a chunk's delta."""
    news: dict[str, Any] = {"content": delta.text} if delta.text else {}
    if delta.reasoning and body.include_reasoning is not False:
        news |= _reasoning(delta.reasoning)
    if delta.calls:
        news["tool_calls"] = call_deltas(delta.calls)
    return news


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names that clients know it by."""
    return {"reasoning": text, "reasoning_content": text}


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
