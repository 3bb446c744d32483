"""The gate in front of the HTTP routes. What is refused here is answered here: inside of CORS, so
that a browser may read why. It does not know who is let in.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.api.http import HEALTH, METRICS, error_response
from frontend.api.page import PUBLIC_PATHS
from frontend.config import FrontendConfig
from frontend.gate import Gate, RateLimited
from frontend.request import Ingress
from tidemill.runtime.errors import ServiceError, Unauthenticated

STRANGER = "is_stranger"
"""Of the state of a request that needs no key: whether it showed none that is known."""


class GateMiddleware:
    """Inside of IngressMiddleware and CORS, outside of everything else."""

    def __init__(self, app: ASGIApp, gate: Gate, config: FrontendConfig) -> None:
        self._app = app
        self._gate = gate
        self._open = HEALTH | PUBLIC_PATHS | ({METRICS} if config.public_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ingress: Ingress = scope["state"]["ingress"]
        headers = Headers(scope=scope)
        shown = headers.get("authorization", ""), headers.get("x-api-key", "")
        if scope["path"] in self._open:
            scope["state"][STRANGER] = not self._gate.knows(ingress.client, *shown)
            await self._app(scope, receive, send)
            return
        try:
            admitted = self._gate.admit(ingress.client, *shown)
        except ServiceError as refused:
            response = error_response(refused, scope["path"])
            if isinstance(refused, RateLimited):
                response.headers.update(refused.left)
            if isinstance(refused, Unauthenticated):
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        scope["state"]["ingress"] = replace(ingress, caller=admitted.caller, use=admitted.use)
        if not admitted.left:
            await self._app(scope, receive, send)
            return
        more = [(name.encode(), text.encode()) for name, text in admitted.left.items()]

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self._app(scope, receive, send_with_limits)
