"""Health routes for probes and people. They answer at any time; the engine may be away."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from frontend.api.http import JsonResponse
from frontend.desk import FrontDesk
from tidemill import __version__


def health_routes(desk: FrontDesk) -> APIRouter:
    """Live while the process runs; ready while requests are taken."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Everything a person wants to know; 503 unless requests are taken."""
        status = 200 if desk.state == "ready" else 503
        return JsonResponse(_health(desk), status_code=status, headers=_retry_after(desk))

    @router.get("/health/ready")
    async def ready() -> Response:
        """For readiness probes."""
        status = 200 if desk.state == "ready" else 503
        return JsonResponse({"status": desk.state}, status_code=status, headers=_retry_after(desk))

    @router.get("/health/live")
    async def live() -> Response:
        """For liveness probes; 200 even while draining."""
        return JsonResponse({"status": "ok"})

    @router.get("/v1/health")
    async def v1_health() -> Response:
        """The short form; an error while requests are not taken."""
        desk.check_ready()
        return JsonResponse({"status": "ok"})

    return router


def _health(desk: FrontDesk) -> dict[str, Any]:
    model, load = desk.model, desk.engine.load
    return {
        "status": desk.state,
        "engine": {"state": desk.engine.state, "address": desk.config.engine},
        "last_error": None if desk.engine.state == "ready" else desk.engine.last_error,
        "engines": desk.engine.told(),
        "model": None if model is None else model.name,
        "replica": desk.replica,
        "requests": desk.num_live,
        "running": load.running,
        "waiting": load.waiting,
        "kv_cache_usage": load.pages_used / max(1, load.pages_total),
        "uptime_s": round(time.monotonic() - desk.started, 3),
        "version": __version__,
    }


def _retry_after(desk: FrontDesk) -> dict[str, str]:
    return {} if desk.state == "ready" else {"retry-after": "1"}
