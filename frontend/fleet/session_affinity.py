"""Routing policy: all requests of one session to one engine, up to a load. Pure.

Rendezvous hashing: when an engine comes or goes, only the sessions that it gains or loses move, and
all frontends agree without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from frontend.fleet.least_loaded import least_loaded
from frontend.fleet.views import EngineView, RequestView, within_cap


def session_affinity(engines: Sequence[EngineView], request: RequestView) -> EngineView:
    """The session's first choice among engines within the cap; least loaded without a session."""
    if not request.session:
        return least_loaded(engines, request)
    return max(within_cap(engines), key=lambda one: _weight(request.session, one.address))


def _weight(session: str, address: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{address}".encode(), digest_size=8).digest()
