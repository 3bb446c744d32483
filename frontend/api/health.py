"""Health routes for probes and people. They answer at any time; the engine may be away."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.api.gated import STRANGER
from frontend.api.http import LOAD, JsonResponse
from frontend.desk import FrontDesk
from tidemill import __version__

FULL_QUEUE = 0.9
FULL_MEMORY = 0.95
"""Shares above which an engine is degraded."""


def health_routes(desk: FrontDesk) -> APIRouter:
    """Live while the process runs; ready while requests are taken."""
    router = APIRouter()

    @router.get("/health")
    async def health(request: Request) -> Response:
        """Everything a person wants to know, if that person has a key; 503 when it is unhealthy."""
        found = _health(desk)
        is_bad = found["status"] == "unhealthy"
        headers = {"retry-after": "1"} if is_bad else {}
        if getattr(request.state, STRANGER, False):
            found = {"status": found["status"]}
        return JsonResponse(found, status_code=503 if is_bad else 200, headers=headers)

    @router.get("/health/ready")
    async def ready() -> Response:
        """For readiness probes."""
        status = 200 if desk.state == "ready" else 503
        return JsonResponse({"status": desk.state}, status_code=status, headers=_retry_after(desk))

    # As other servers have it, for platforms that ask there whether an instance serves.
    router.get("/ping")(ready)
    router.post("/ping")(ready)

    @router.get("/health/live")
    async def live() -> Response:
        """For liveness probes; 200 even while draining."""
        return JsonResponse({"status": "ok"})

    @router.get("/v1/health")
    async def v1_health() -> Response:
        """The short form; an error while requests are not taken."""
        desk.check_ready()
        return JsonResponse({"status": "ok"})

    @router.get(LOAD)
    async def load() -> Response:
        """How many requests are in the house, by vLLM's name for it."""
        return JsonResponse({"server_load": desk.num_live})

    return router


def _health(desk: FrontDesk) -> dict[str, Any]:
    model, load = desk.model, desk.fleet.load
    facts = None if model is None else model.facts
    status, reasons = _verdict(desk)
    return {
        "status": status,
        "reasons": reasons,
        "state": desk.state,
        "engine": {
            "session": desk.fleet.state,
            "state": load.state or None,
            "address": desk.config.engine,
            "device": None if facts is None else facts.device,
        },
        "model_loaded": model is not None and desk.fleet.state != "connecting",
        "last_error": None if desk.fleet.state == "ready" else desk.fleet.last_error,
        "engines": desk.fleet.told(),
        "model": None if model is None else model.name,
        "replica": desk.replica,
        "requests": desk.num_live,
        "running": load.running,
        "waiting": load.waiting,
        "queue_size": load.waiting,
        "queue_capacity": desk.fleet.queue_capacity,
        "memory_used_bytes": load.memory_used or None,
        "memory_total_bytes": load.memory_total or None,
        "kv_cache_usage": load.pages_used / max(1, load.pages_total),
        "uptime_s": round(time.monotonic() - desk.started, 3),
        "version": __version__,
    }


def _verdict(desk: FrontDesk) -> tuple[str, list[str]]:
    """healthy, degraded or unhealthy, and why."""
    if desk.state in ("starting", "stalled"):
        return "unhealthy", [desk.fleet.last_error]
    load, reasons = desk.fleet.load, []
    if desk.state == "draining":
        reasons.append("draining")
    members = desk.fleet.members
    if away := sum(one.state not in ("ready", "leaving") for one in members):
        reasons.append(f"{away} of {len(members)} engines take no requests")
    capacity = desk.fleet.queue_capacity
    if capacity and load.waiting > FULL_QUEUE * capacity:
        reasons.append("the engine's queue is nearly full")
    if load.memory_total and load.memory_used > FULL_MEMORY * load.memory_total:
        reasons.append("the engine's device memory is nearly full")
    return ("degraded" if reasons else "healthy"), reasons


def _retry_after(desk: FrontDesk) -> dict[str, str]:
    return {} if desk.state == "ready" else {"retry-after": "1"}
