"""Routes beside generation: models, metrics, tokenize, version."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.api.bodies import read_body
from frontend.api.document import documented
from frontend.api.http import JsonResponse
from frontend.api.openai_request import parse, to_messages
from frontend.api.openai_schema import DetokenizeBody, TokenizeBody
from frontend.api.openai_tools import with_tools
from frontend.api.query import ModelsQuery, documented_query, read_query
from frontend.api.tool_choice import ToolChoice
from frontend.desk import FrontDesk
from frontend.reading import check_place
from frontend.served import ServedModel
from frontend.tokenizer import Vocabulary
from tidemill import __version__
from tidemill.runtime.errors import InvalidRequest


def admin_routes(desk: FrontDesk) -> APIRouter:
    """The router; 503 where the engine is needed and away."""
    router = APIRouter()

    @router.get("/v1/models", openapi_extra=documented_query(ModelsQuery))
    async def list_models(request: Request) -> Response:
        """The served model, under each of its names."""
        asked, model = read_query(request, ModelsQuery), desk.check_ready()
        names, has_more = _page(model.names.listed, asked)
        ends = dict.fromkeys(("first_id", "last_id"))
        if names:
            ends = {"first_id": names[0], "last_id": names[-1]}
        cards = [_card(model, name) for name in names]
        return JsonResponse({"object": "list", "data": cards, **ends, "has_more": has_more})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        """One model's card, or 404."""
        model = desk.model_for(name)
        return JsonResponse(_card(model, model.called(name)))

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus; as OpenMetrics, with exemplars, for those who ask for it."""
        text, content_type = desk.metrics_text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    @router.get("/version")
    async def version() -> Response:
        """The version of this build."""
        return JsonResponse({"version": __version__})

    @router.post("/tokenize", openapi_extra=documented(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of rendered messages."""
        body = parse(await read_body(request, desk.config.max_body_bytes), TokenizeBody)
        return JsonResponse(await _tokenize(desk, body))

    @router.post("/detokenize", openapi_extra=documented(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = parse(await read_body(request, desk.config.max_body_bytes), DetokenizeBody)
        model = desk.model_for(body.model or "")
        skip = body.skip_special_tokens is not False
        text = await desk.detokenize(model, body.tokens, skip_special_tokens=skip)
        return JsonResponse({"prompt": text})

    return router


async def _tokenize(desk: FrontDesk, body: TokenizeBody) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    for name in (
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "tools",
    ):
        if body.prompt is not None and getattr(body, name) is not None:
            raise InvalidRequest(f"{name} needs messages; this request has a prompt", param=name)
    model = desk.model_for(body.model or "")
    prompt = body.prompt
    if prompt is None:
        chat = to_messages(
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs or {},
        )
        chat = with_tools(chat, body.tools or (), ToolChoice(), parallel=None)
        check_place(chat, model.template.variables)
        token_ids = await desk.tokenize(model, chat, body.add_special_tokens)
    else:
        token_ids = await desk.tokenize(model, prompt, body.add_special_tokens)
    pieces = None
    if body.return_token_strs:
        pieces = await desk.pool.run(_texts, model.tokenizer, token_ids, size=len(token_ids))
    return {
        "count": len(token_ids),
        "max_model_len": model.facts.max_model_len,
        "tokens": token_ids,
        "token_strs": pieces,
    }


def _texts(tokenizer: Vocabulary, token_ids: Sequence[int]) -> list[str]:
    return [tokenizer.piece(token_id).text for token_id in token_ids]


def _page(names: Sequence[str], asked: ModelsQuery) -> tuple[Sequence[str], bool]:
    """The names of a page, and whether more follow in its direction."""
    first, last = 0, len(names)
    for name in ("after_id", "before_id"):
        if (end := getattr(asked, name)) is not None:
            if end not in names:
                raise InvalidRequest(f"{name}: no model has that id", param=name)
            place = names.index(end)
            first, last = (place + 1, last) if name == "after_id" else (first, place)
    page = names[first:last]
    if asked.before_id is not None and asked.after_id is None:
        return page[-asked.limit :], len(page) > asked.limit
    return page[: asked.limit], len(page) > asked.limit


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    """For OpenAI's clients and, from `type` on, for Anthropic's too: both ask the same routes."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "tidemill",
        "root": model.facts.model_id,
        "parent": None,
        "max_model_len": model.facts.max_model_len,
        "default_method": model.facts.default_method,
        "methods": model.facts.methods,
        "approximate_caches": model.facts.approximate_caches,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
    }
