"""Routing policy: where the least is in use or wanted of rows and KV. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.fleet.views import EngineView, RequestView


def least_loaded(engines: Sequence[EngineView], request: RequestView) -> EngineView:
    """Least demand; equal ones take turns, so that idle engines share what comes."""
    ordered = sorted(engines, key=lambda one: one.address)
    turn = request.number % len(ordered)
    return min(ordered[turn:] + ordered[:turn], key=lambda one: one.demand)
