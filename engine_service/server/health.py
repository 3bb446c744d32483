"""What the engine says of its health to people and probes over HTTP.

It does not know HTTP; it reads what Desk holds.
"""

from __future__ import annotations

from typing import Any

from engine_service.server.metrics import Reading
from engine_service.server.state import SERVING, EngineState

FULL_QUEUE = 0.9
FULL_MEMORY = 0.95
"""Shares above which an engine is degraded. Free KV pages are no use of memory."""
_DEAD = (EngineState.ERROR, EngineState.SHUTDOWN)


def is_alive(reading: Reading, hang_timeout_s: float) -> bool:
    """False once nothing but a restart can help: also when nobody is left who could say so,
    because the event loop hangs. `hang_timeout_s` 0: silence is no reason."""
    hangs = 0 < hang_timeout_s < reading.silence_ms / 1000
    return reading.snapshot.state not in _DEAD and not hangs


def memory_in_use(reading: Reading) -> int:
    """Bytes of the device that hold something: pages of KV count where they are taken."""
    memory, load = reading.tally.memory, reading.snapshot.load
    free_pages = 1 - load.pages_used / max(1, load.pages_total)
    return max(0, memory.used - int(memory.kv * free_pages))


def verdict(reading: Reading) -> tuple[str, list[str]]:
    """healthy, degraded or unhealthy, and why."""
    snapshot, total = reading.snapshot, reading.tally.memory.total
    if snapshot.stalled or snapshot.state not in (*SERVING, EngineState.DRAINING):
        return "unhealthy", [f"{snapshot.state.name.lower()}: {snapshot.detail}"]
    reasons = []
    if snapshot.state is EngineState.DRAINING:
        reasons.append("draining")
    if reading.facts and snapshot.load.waiting > FULL_QUEUE * reading.facts.max_queued_requests:
        reasons.append("the queue is nearly full")
    if total and memory_in_use(reading) > FULL_MEMORY * total:
        reasons.append("device memory is nearly full")
    return ("degraded" if reasons else "healthy"), reasons


def describe(reading: Reading, last_error: str | None) -> dict[str, Any]:
    """The whole of GET /health."""
    status, reasons = verdict(reading)
    snapshot, facts, memory = reading.snapshot, reading.facts, reading.tally.memory
    return {
        "status": status,
        "reasons": reasons,
        "state": snapshot.state.name.lower(),
        "ready": snapshot.is_ready,
        "detail": snapshot.detail,
        "model": None if facts is None else facts.model_id,
        "model_loaded": facts is not None,
        "device": None if facts is None else facts.device,
        "queue_size": snapshot.load.waiting,
        "queue_capacity": 0 if facts is None else facts.max_queued_requests,
        "running": snapshot.load.running,
        "kv_cache_usage": snapshot.load.pages_used / max(1, snapshot.load.pages_total),
        "memory_used_bytes": memory_in_use(reading) or None,
        "memory_total_bytes": memory.total or None,
        "memory_peak_bytes": memory.peak or None,
        "silence_ms": reading.silence_ms,
        "uptime_s": round(reading.uptime_s, 3),
        "last_error": last_error,
    }
