"""Routing policy: where the longest beginning of the prompt is cached, up to a load. Pure.

The cap spreads hot prefixes: whoever is turned away goes to another engine, which holds the prefix
from then on too.
"""

from __future__ import annotations

from collections.abc import Sequence

from frontend.fleet.least_loaded import least_loaded
from frontend.fleet.views import EngineView, RequestView, within_cap


def prefix_affinity(engines: Sequence[EngineView], request: RequestView) -> EngineView:
    """The least loaded of those that hold most of the prompt, among engines within the cap."""
    allowed = within_cap(engines)
    most = max(request.hits.get(one.address, 0) for one in allowed)
    if not most:
        return least_loaded(engines, request)
    return least_loaded([o for o in allowed if request.hits.get(o.address, 0) == most], request)
