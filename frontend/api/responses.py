"""/v1/responses: the routes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.api.bodies import read_body
from frontend.api.document import documented
from frontend.api.http import JsonResponse
from frontend.api.openai_request import parse
from frontend.api.query import InputItemsQuery, ResponseQuery, documented_query, read_query
from frontend.api.responses_input import page
from frontend.api.responses_making import Responses
from frontend.api.responses_schema import ResponsesBody
from frontend.desk import FrontDesk
from frontend.request import Chat


def responses_routes(desk: FrontDesk) -> APIRouter:
    """The router."""
    router, kept = APIRouter(), Responses(desk)

    @router.post("/v1/responses", openapi_extra=documented(ResponsesBody))
    async def create_response(request: Request) -> Response:
        """Answers a conversation: whole, as a stream of events, or in the background."""
        body = parse(await read_body(request, desk.config.max_body_bytes), ResponsesBody)
        return await kept.create(body, request)

    @router.post("/v1/responses/input_tokens", openapi_extra=documented(ResponsesBody))
    async def count_tokens(request: Request) -> Response:
        """How long the prompt of a response is."""
        body = parse(await read_body(request, desk.config.max_body_bytes), ResponsesBody)
        (chat,) = kept.asked(body).request.prompts
        assert isinstance(chat, Chat), "a response to a text"
        token_ids = await desk.tokenize(desk.model_for(body.model or ""), chat, None)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    @router.get("/v1/responses/{name}", openapi_extra=documented_query(ResponseQuery))
    async def get_response(name: str, request: Request) -> Response:
        """A response that this frontend keeps, or with `stream` its events."""
        return kept.told(name, read_query(request, ResponseQuery))

    of_items = documented_query(InputItemsQuery)

    @router.get("/v1/responses/{name}/input_items", openapi_extra=of_items)
    async def list_input_items(name: str, request: Request) -> Response:
        """The conversation that a response answers, page by page."""
        asked, items = read_query(request, InputItemsQuery), kept.shelf.get(name).items
        shown = page(items, limit=asked.limit, order=asked.order, after=asked.after)
        return JsonResponse(shown)

    @router.post("/v1/responses/{name}/cancel")
    async def cancel_response(name: str) -> Response:
        """Ends a response in the background; one that has ended is answered as it is."""
        return JsonResponse(await kept.cancel(name))

    @router.delete("/v1/responses/{name}")
    async def delete_response(name: str) -> Response:
        """Forgets a response; one that is still being made ends."""
        kept.shelf.remove(name)
        await desk.background.cancel(name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})

    return router
