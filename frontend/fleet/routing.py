"""The routing policies by the names that `--routing` knows them by."""

from __future__ import annotations

from frontend.fleet.least_loaded import least_loaded
from frontend.fleet.prefix_affinity import prefix_affinity
from frontend.fleet.round_robin import round_robin
from frontend.fleet.session_affinity import session_affinity
from frontend.fleet.views import Policy

POLICIES: dict[str, Policy] = {
    "least_loaded": least_loaded,
    "prefix_affinity": prefix_affinity,
    "round_robin": round_robin,
    "session_affinity": session_affinity,
}
