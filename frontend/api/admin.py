"""Routes beside generation: models, metrics, tokenize, version."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.api.document import documented
from frontend.api.http import JsonResponse, read_body
from frontend.api.openai_request import parse, to_messages
from frontend.api.openai_schema import DetokenizeBody, TokenizeBody
from frontend.api.openai_tools import with_tools
from frontend.api.query import ModelsQuery, documented_query, read_query
from frontend.desk import FrontDesk
from frontend.reading import check_place
from frontend.served import ServedModel
from tidemill import __version__
from tidemill.runtime.errors import InvalidRequest


def admin_routes(desk: FrontDesk) -> APIRouter:
    """The router; 503 where the engine is needed and away."""
    router = APIRouter()

    @router.get("/v1/models", openapi_extra=documented_query(ModelsQuery))
    async def list_models(request: Request) -> Response:
        """The served model."""
        asked, card = read_query(request, ModelsQuery), _card(desk.check_ready())
        for name in ("after_id", "before_id"):
            if getattr(asked, name) not in (None, card["id"]):
                raise InvalidRequest(f"{name}: no model has that id", param=name)
        cards = [card] if asked.after_id is None and asked.before_id is None else []
        end = card["id"] if cards else None
        ends = {"first_id": end, "last_id": end, "has_more": False}
        return JsonResponse({"object": "list", "data": cards, **ends})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        """One model's card, or 404."""
        return JsonResponse(_card(desk.model_for(name)))

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
        chat = with_tools(chat, body.tools or (), None, parallel=None)
        check_place(chat, model.template.variables)
        token_ids = await desk.tokenize(model, chat, body.add_special_tokens)
    else:
        token_ids = await desk.tokenize(model, prompt, body.add_special_tokens)
    pieces = None
    if body.return_token_strs:
        pieces = [model.tokenizer.piece(token_id).text for token_id in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": model.facts.max_model_len,
        "tokens": token_ids,
        "token_strs": pieces,
    }


def _card(model: ServedModel) -> dict[str, Any]:
    """For OpenAI's clients and, from `type` on, for Anthropic's too: both ask the same routes."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tidemill",
        "root": model.facts.model_id,
        "parent": None,
        "max_model_len": model.facts.max_model_len,
        "default_method": model.facts.default_method,
        "methods": model.facts.methods,
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
    }
