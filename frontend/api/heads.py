"""HEAD for whatever answers GET (RFC 9110, 9.1): monitors ask so whether a server is well.

It does not know what is asked.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.routing import APIRoute


def with_heads(router: APIRouter) -> APIRouter:
    """The same router. The server below sends of such an answer what stands ahead of its body."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            router.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False
            )
    return router
