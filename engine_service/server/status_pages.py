"""The pages of the engine's HTTP port: metrics for scrapes, health for probes and people."""

from __future__ import annotations

from engine_service.server.desk import Desk
from engine_service.server.health import describe, is_alive
from engine_service.server.metrics_port import Page, json_page
from tidemill.telemetry.exposition import Alias, expose

Answer = tuple[int, bytes, str]


def status_pages(desk: Desk, alias: Alias) -> dict[str, Page]:
    """By path. Each is called from a thread of its own and only reads: what it says is right while
    the event loop hangs, too."""
    hang_timeout_s = desk.config.hang_timeout_s

    def metrics(accept: str) -> Answer:
        return 200, *expose(desk.observer.metrics.registry, accept, alias)

    def health(accept: str) -> Answer:
        found = describe(desk.reading(), desk.last_error)
        return json_page(503 if found["status"] == "unhealthy" else 200, found)

    def live(accept: str) -> Answer:
        alive = is_alive(desk.reading(), hang_timeout_s)
        return json_page(*((200, {"status": "ok"}) if alive else _DEAD))

    def ready(accept: str) -> Answer:
        snapshot = desk.reading().snapshot
        state = {"status": snapshot.state.name.lower(), "detail": snapshot.detail}
        return json_page(200 if snapshot.is_ready else 503, state)

    return {
        "/metrics": metrics,
        "/health": health,
        "/health/live": live,
        "/health/ready": ready,
    }


_DEAD = (503, {"status": "dead"})
