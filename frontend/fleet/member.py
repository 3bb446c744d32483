"""One engine of the fleet: its client, and what is remembered of it from session to session.

It does not know which requests it gets.
"""

from __future__ import annotations

import asyncio
from typing import Any

from frontend.engine_client import EngineClient
from frontend.fleet.outlier import Outlier
from frontend.fleet.prefill_picks import PrefillPicks
from frontend.fleet.views import EngineView

UNTROUBLED = ("ready", "paused", "leaving")
"""States of an engine that nothing is wrong with."""


class Member:
    """Counters are of the whole life of the address in the fleet."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.outlier = Outlier()
        self.picks = PrefillPicks()
        self.is_leaving = False
        """Discovery does not name it any more: it finishes what it has."""
        self.num_routed = 0
        """Requests that were sent there."""
        self.num_retried = 0
        """Requests that failed there and were sent to another engine."""

    @property
    def state(self) -> str:
        """The client's, or leaving, ejected, or paused."""
        state = self.client.state
        if state != "ready":
            return state
        if self.is_leaving:
            return "leaving"
        if self.outlier.is_ejected(asyncio.get_running_loop().time()):
            return "ejected"
        return "paused" if self.client.load.paused else "ready"

    @property
    def role(self) -> str:
        """both, prefill or decode; both while it has not said."""
        facts = self.client.facts
        return "both" if facts is None else facts.role

    @property
    def is_idle(self) -> bool:
        """Whether nothing of ours is there."""
        return not (self.client.num_slots or self.client.num_pooling)

    def view(self) -> EngineView:
        """What a routing policy sees."""
        client, load, facts = self.client, self.client.load, self.client.facts
        sent, sent_tokens = client.sent
        picked, picked_tokens = self.picks.unknown(client.reported_at)
        page = facts.page_size if facts is not None else 0
        return EngineView(
            address=client.address,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            kv_tokens_used=load.pages_used * page,
            kv_tokens=load.pages_total * page,
            max_rows=facts.max_rows if facts is not None else 0,
            max_queued=facts.max_queued_requests if facts is not None else 0,
            sent=sent + picked,
            sent_tokens=sent_tokens + picked_tokens,
        )

    def told(self) -> dict[str, Any]:
        """What /health shows."""
        client, load = self.client, self.client.load
        is_open = client.state != "connecting"
        return {
            "address": client.address,
            "state": self.state,
            "role": self.role if is_open else None,
            "instance_id": client.instance_id if is_open else None,
            "last_error": None if self.state in UNTROUBLED else client.trouble,
            "running": load.running,
            "waiting": load.waiting,
            "kv_cache_usage": load.pages_used / max(1, load.pages_total),
            "requests_routed": self.num_routed,
            "ejections": self.outlier.num_ejections,
        }
