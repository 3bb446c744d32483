"""Routing policy: one after the other, whatever they have to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.fleet.views import EngineView, RequestView


def round_robin(engines: Sequence[EngineView], request: RequestView) -> EngineView:
    """The next one in the order of addresses."""
    ordered = sorted(engines, key=lambda one: one.address)
    return ordered[request.number % len(ordered)]
