"""The HTTP application: routes, error mapping and the ingress around them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from frontend.api import chat, completions
from frontend.api.admin import admin_routes
from frontend.api.bodies import read_body
from frontend.api.classify import classify_routes
from frontend.api.cors import cors_options
from frontend.api.document import DocumentedApp, documented
from frontend.api.embeddings import embeddings_routes
from frontend.api.gated import GateMiddleware
from frontend.api.heads import with_heads
from frontend.api.health import health_routes
from frontend.api.http import (
    IngressMiddleware,
    JsonResponse,
    error_response,
    to_service_error,
    unless_gone,
)
from frontend.api.jobs import job_routes
from frontend.api.messages import messages_routes
from frontend.api.oip_routes import oip_routes
from frontend.api.openai_request import parse
from frontend.api.openai_schema import ChatBody, CompletionBody
from frontend.api.page import page_routes
from frontend.api.rerank import rerank_routes
from frontend.api.responses import responses_routes
from frontend.api.sse import EventStream
from frontend.desk import FrontDesk
from frontend.gate import Gate
from tidemill import __version__
from tidemill.runtime.errors import ServiceError


class _BusyRoute(APIRoute):
    """Its function takes the request and nothing else: it is documented like others, and FastAPI
    spends nothing on what it could inject (25 of 50 us a request)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def build_http(desk: FrontDesk, gate: Gate) -> FastAPI:
    """The ASGI application that serves `desk` to whom `gate` lets in."""
    app = DocumentedApp(title="Tidemill", version=__version__)
    app.router.route_class = _BusyRoute

    @app.post("/v1/chat/completions", openapi_extra=documented(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        """Answers a conversation, whole or as a stream of events."""
        body = parse(await read_body(request, desk.config.max_body_bytes), ChatBody)
        ingress = request.state.ingress
        if body.stream:
            return EventStream(chat.stream(desk, body, ingress))
        work = chat.complete(desk, body, ingress)
        return JsonResponse(await unless_gone(request.receive, work))

    @app.post("/v1/completions", openapi_extra=documented(CompletionBody))
    async def create_completion(request: Request) -> Response:
        """Completes prompts, whole or as a stream of events."""
        body = parse(await read_body(request, desk.config.max_body_bytes), CompletionBody)
        ingress = request.state.ingress
        if body.stream:
            return EventStream(completions.stream(desk, body, ingress))
        work = completions.complete(desk, body, ingress)
        return JsonResponse(await unless_gone(request.receive, work))

    # Behind those above, which are asked most: routes are tried one after the other.
    app.include_router(with_heads(admin_routes(desk)))
    app.include_router(classify_routes(desk))
    app.include_router(embeddings_routes(desk))
    app.include_router(with_heads(health_routes(desk)))
    app.include_router(job_routes(desk))
    app.include_router(messages_routes(desk))
    app.include_router(with_heads(oip_routes(desk)))
    app.include_router(rerank_routes(desk))
    app.include_router(responses_routes(desk))
    app.include_router(page_routes(desk))

    async def answer_failure(request: Request, failure: Exception) -> Response:
        return error_response(to_service_error(failure, request), request.url.path)

    for kind in (ServiceError, HTTPException):
        app.add_exception_handler(kind, answer_failure)
    # The last one added is outermost: id, log and safe headers, then CORS, then the gate.
    if not gate.is_open:
        app.add_middleware(GateMiddleware, gate=gate, config=desk.config)
    if (cors := cors_options(desk.config)) is not None:
        app.add_middleware(CORSMiddleware, **cors)
    app.add_middleware(IngressMiddleware, desk=desk, gate=gate)
    return app
