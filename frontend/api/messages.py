"""POST /v1/messages and its token counter: Anthropic's shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.api.anthropic_blocks import Blocks, message_event
from frontend.api.anthropic_request import tells_thinking, to_conversation, to_request
from frontend.api.anthropic_schema import CountTokensBody, MessagesBody
from frontend.api.bodies import read_body
from frontend.api.document import documented
from frontend.api.envelopes import ANTHROPIC_PATH, anthropic_error
from frontend.api.finished import check_finished
from frontend.api.http import JsonResponse, unless_gone
from frontend.api.openai_request import parse
from frontend.api.sse import EventStream, named_event
from frontend.desk import FrontDesk
from frontend.generation import Generation
from frontend.reading import check_tools
from frontend.request import Ingress, Options, TextRequest
from tidemill.runtime.errors import ServiceError

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_routes(desk: FrontDesk) -> APIRouter:
    """The router."""
    router = APIRouter()

    @router.post(ANTHROPIC_PATH, openapi_extra=documented(MessagesBody))
    async def create_message(request: Request) -> Response:
        """Answers a conversation, whole or as a stream of events."""
        body = parse(await read_body(request, desk.config.max_body_bytes), MessagesBody)
        ingress = request.state.ingress
        if body.stream:
            return EventStream(stream(desk, body, ingress), end)
        return JsonResponse(await unless_gone(request.receive, complete(desk, body, ingress)))

    @router.post(f"{ANTHROPIC_PATH}/count_tokens", openapi_extra=documented(CountTokensBody))
    async def count_tokens(request: Request) -> Response:
        """How long the prompt of a conversation is."""
        body = parse(await read_body(request, desk.config.max_body_bytes), CountTokensBody)
        model = desk.model_for(body.model or "")
        chat = to_conversation(body, model.template.variables)
        asked = TextRequest(prompts=(chat,), options=Options())
        check_tools(asked, model.output, model.template.variables)
        token_ids = await desk.tokenize(model, chat, None)
        counted = {"input_tokens": len(token_ids)}
        edited = {"original_input_tokens": len(token_ids)}
        managed = {} if body.context_management is None else {"context_management": edited}
        return JsonResponse({**counted, **managed})

    return router


async def complete(desk: FrontDesk, body: MessagesBody, ingress: Ingress) -> dict[str, Any]:
    """The whole answer as one object."""
    blocks = Blocks(tells_thinking=tells_thinking(body))
    async with _generation(desk, body, ingress) as generation:
        async for news in generation.deltas():
            for delta in news:
                blocks.feed(delta)
                if delta.finish_reason is not None:
                    ending = _ending(delta.finish_reason, generation)
    blocks.close()
    return {
        **_message(generation, ingress),
        "content": blocks.content,
        **ending,
        "usage": _usage(generation),
        **_edited(body),
    }


async def stream(
    desk: FrontDesk, body: MessagesBody, ingress: Ingress
) -> AsyncGenerator[bytes, None]:
    """The answer as events: the message without its content, block after block, the end.

    How much of the prompt was cached is known at the end only: until then it is null, and
    `input_tokens` counts the whole prompt.
    """
    blocks = Blocks(tells_thinking=tells_thinking(body))
    async with _generation(desk, body, ingress) as generation:
        unsent = _opening(generation, ingress)
        async for news in generation.deltas():
            for delta in news:
                unsent += blocks.feed(delta)
                if delta.finish_reason is not None:
                    ending = _ending(delta.finish_reason, generation)
                    unsent += blocks.close()
                    rest = {"usage": _usage(generation), **_edited(body)}
                    unsent += message_event("message_delta", delta=ending, **rest)
                    unsent += message_event("message_stop")
            if unsent:
                yield unsent
                unsent = b""


def end(failure: ServiceError | None) -> bytes:
    """Behind a whole message nothing follows; a failure is an event of its own."""
    return b"" if failure is None else named_event("error", anthropic_error(failure))


def _generation(desk: FrontDesk, body: MessagesBody, ingress: Ingress) -> Generation:
    variables = desk.model_for(body.model or "").template.variables
    return desk.generation(to_request(body, variables), ingress)


def _edited(body: MessagesBody) -> dict[str, Any]:
    """What was cleared from the conversation: those edits alone are served that clear nothing."""
    return {} if body.context_management is None else {"context_management": {"applied_edits": []}}


def _message(generation: Generation, ingress: Ingress) -> dict[str, Any]:
    return {
        "id": f"msg_{ingress.request_id}",
        "type": "message",
        "role": "assistant",
        "model": generation.called,
    }


def _ending(finish_reason: str, generation: Generation) -> dict[str, Any]:
    """Why the text ended. Raises ServiceError when the engine could not finish it."""
    check_finished(finish_reason)
    matched = generation.choices[0].matched
    if finish_reason == "stop" and matched is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS[finish_reason], "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, Any]:
    """Anthropic counts what was read from the cache beside `input_tokens`, not in it."""
    usage = generation.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def _opening(generation: Generation, ingress: Ingress) -> bytes:
    usage = {
        "input_tokens": generation.usage.prompt_tokens,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": None,
        "output_tokens": 0,
    }
    unfinished: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    message = {**_message(generation, ingress), **unfinished}
    return message_event("message_start", message=message) + message_event("ping")
