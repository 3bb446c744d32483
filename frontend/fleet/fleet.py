"""The engines behind this frontend as one: who is in, who takes requests, which one gets the next.

It does not know text. Each engine has a session of its own; tokens go from there to their call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from frontend.engine_client import EngineClient
from frontend.fleet.adoption import Adoption, Models
from frontend.fleet.discovery import Discovery
from frontend.fleet.member import UNTROUBLED, Member
from frontend.fleet.prefixes import Prefixes
from frontend.fleet.routing import POLICIES
from frontend.fleet.views import RequestView
from frontend.liveness import checked_silence
from frontend.messages import EngineFacts, Load
from frontend.rounds import Rounds
from tidemill.runtime.errors import Overloaded, ServiceError, Unavailable
from tidemill.security.client_tls import Dialing

_LOG = logging.getLogger("tidemill.frontend.fleet")
_TICK_S = 0.25
_RETRY_AFTER_MS = 1000
_TAKERS = ("ready", "ejected", "paused")
"""States of engines that get requests: those of a state where there are none of the one before."""


class Fleet:
    """Owns the clients of all engines, whose connections `dial` opens. `models` hears of each
    before it gets requests."""

    def __init__(
        self,
        discovery: Discovery,
        *,
        routing: str,
        dial: Dialing,
        silence_s: float,
        models: Models,
    ) -> None:
        """An engine that is silent for `silence_s` is gone; InvalidRequest for too few."""
        self._silence_s = checked_silence(silence_s)
        self._discovery = discovery
        self._policy = POLICIES[routing]
        self._dial = dial
        self._adoption = Adoption(models)
        self._rounds = Rounds()
        self._members: dict[str, Member] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._numbers = Counter[bool]()
        """Of requests, by what `pick` was asked for: turns among either see every number."""
        self.is_closing = False
        """Nothing is sent to another engine any more."""
        self.live: Counter[str] = Counter()
        """Requests that engines have, by the fairness key of their client. Written by routes."""
        self.prefixes = Prefixes() if routing == "prefix_affinity" else None

    def start(self) -> None:
        """Begins to look for engines and to connect. Call in the running loop, once."""
        self._tasks = [
            asyncio.create_task(self._discover(), name="engine-discovery"),
            asyncio.create_task(self._tick(), name="fleet"),
        ]

    def cut_short(self, error: ServiceError) -> None:
        """Every live request ends with `error`, behind what has arrived of it."""
        self.is_closing = True
        for one in self._members.values():
            one.client.cut_short(error)

    async def close(self) -> None:
        """Ends all sessions; live requests fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.prefixes is not None:
            await self.prefixes.close()
        await asyncio.gather(*(one.client.close() for one in self.members))
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def members(self) -> list[Member]:
        """All engines, by address."""
        return [self._members[address] for address in sorted(self._members)]

    @property
    def state(self) -> str:
        """ready while one engine takes requests, or lets them wait; else stalled if one is silent,
        draining if one finishes its own, or connecting."""
        states = {one.state for one in self._members.values() if one.role != "prefill"}
        if states & set(_TAKERS):
            return "ready"
        if "silent" in states:
            return "stalled"
        return "draining" if states & {"draining", "leaving"} else "connecting"

    @property
    def num_open(self) -> int:
        """Engines with an open session."""
        return sum(one.client.state != "connecting" for one in self._members.values())

    @property
    def num_slots(self) -> int:
        """Sequences that engines still owe something."""
        return sum(one.client.num_slots for one in self._members.values())

    @property
    def load(self) -> Load:
        """The last reports of all engines, added up."""
        return Load.of_all(one.client.load for one in self._members.values())

    @property
    def queue_capacity(self) -> int:
        """Sequences that may wait in all engines together; 0 while none says so."""
        facts = [one.client.facts for one in self._members.values()]
        return sum(one.max_queued_requests for one in facts if one is not None)

    @property
    def last_error(self) -> str:
        """Why engines take no requests, or the discovery knows none; '' when all do."""
        troubles = [one.client.trouble for one in self.members if one.state not in UNTROUBLED]
        if self._discovery.last_error:
            troubles.append(self._discovery.last_error)
        if not troubles and all(one.role == "prefill" for one in self.members):
            troubles.append("no engine that generates is known yet")
        return "; ".join(dict.fromkeys(troubles))

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether an engine takes requests, after waiting for one at most this long."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.state != "ready":
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def check_ready(self) -> None:
        """Raises Unavailable when no engine takes requests."""
        if self.state == "ready":
            return
        members = self.members
        for one in members if len(members) == 1 else ():
            one.client.check_ready()
        if self.state == "draining":
            raise Unavailable(
                "every engine is draining: they finish running requests and then stop",
                reason="DRAINING",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        raise Unavailable(
            f"none of {len(members)} engines is up: {self.last_error}; try again shortly",
            reason="ENGINE_NOT_UP",
            retry_after_ms=_RETRY_AFTER_MS,
        )

    def check_room(self, tenant: str, priority: int) -> None:
        """Raises Overloaded when every engine's queue is full: whatever came now would be
        tokenized and sent for nothing. Whoever has nothing there yet, or is more urgent, may ask
        all the same: an engine gives him the place of somebody who has much."""
        if priority > 0 or not self.live[tenant]:
            return
        views = [one.view() for one in self.usable()]
        if views and all(one.is_full for one in views):
            waiting, most = sum(v.queued for v in views), sum(v.max_queued for v in views)
            raise Overloaded(
                f"{waiting} requests are waiting in {len(views)} engines, the limit is {most} "
                "(--max-queued-requests of the engine); try again shortly",
                retry_after_ms=_RETRY_AFTER_MS,
            )

    def pick(
        self,
        request: Callable[[int], RequestView],
        *,
        but_not: Callable[[Member], bool],
        prefills: bool = False,
    ) -> Member:
        """The engine for a request that may not go to some. `request` gets its number. Raises
        Unavailable when there is none."""
        self.check_ready()
        members = {one.client.address: one for one in self.usable(prefills) if not but_not(one)}
        if not members:
            raise Unavailable(
                "no other engine takes this request; try again shortly",
                reason="ENGINE_NOT_UP",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        views = [one.view() for one in members.values()]
        roomy = [one for one in views if not one.is_full]
        self._numbers[prefills] += 1
        chosen = self._policy(roomy or views, request(self._numbers[prefills]))
        return members[chosen.address]

    def usable(self, prefills: bool = False) -> list[Member]:
        """Those that are ready; where none is, those that are ejected, or else that are paused.
        Either those that generate, or those that compute prompts for them: never a paused one, as
        the engine that waits for its prompt computes it itself."""
        members = [one for one in self._members.values() if (one.role == "prefill") is prefills]
        states = [state for state in _TAKERS if not (prefills and state == "paused")]
        by_state = ([one for one in members if one.state == state] for state in states)
        return next(filter(None, by_state), [])

    async def _discover(self) -> None:
        try:
            async for addresses in self._discovery.watch():
                self.take(addresses)
        except ServiceError as failure:
            self._discovery.last_error = failure.message
            _LOG.error("engines cannot be found: %s", failure.message)
        except Exception as bug:  # without a word, engines would just never come or go again
            self._discovery.last_error = f"engines are not looked for: {type(bug).__name__}: {bug}"
            _LOG.exception("engines are not looked for any more")

    def take(self, addresses: frozenset[str]) -> None:
        """New addresses join; those that are gone leave when they have finished."""
        for address in addresses - self._members.keys():
            client = EngineClient(
                self._dial.dialer(address),
                silence_s=self._silence_s,
                rounds=self._rounds,
                on_connected=self._adopt,
                on_change=self._on_change,
            )
            self._members[address] = Member(client)
            client.start()
            _LOG.info("an engine joins", extra={"engine": address})
        for address, one in self._members.items():
            is_leaving = address not in addresses
            if is_leaving and not one.is_leaving:
                _LOG.info("an engine leaves", extra={"engine": address})
            one.is_leaving = is_leaving
        self._tell()

    async def _adopt(self, client: EngineClient, facts: EngineFacts) -> None:
        """An engine that has answered. Raises FailedPrecondition when it is not one of us."""

        def known() -> dict[str, EngineFacts]:
            others = [one.client for one in self.members if one.client is not client]
            return {one.address: one.facts for one in others if one.facts is not None}

        await self._adoption.adopt(client, facts, known)

    def _on_change(self, client: EngineClient, is_open: bool) -> None:
        member = self._members.get(client.address)
        if member is None:
            return
        if not is_open and not client.is_draining:
            member.outlier.lost(asyncio.get_running_loop().time())
        if self.prefixes is not None:
            if is_open and client.channel is not None:
                self.prefixes.follow(client.address, client.instance_id, client.channel)
            else:
                self.prefixes.pause(client.address)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _tick(self) -> None:
        """Lets leaving engines go, and wakes who waits for an engine that is silent or ejected."""
        while True:
            await asyncio.sleep(_TICK_S)
            for one in self.members:
                if one.is_leaving and one.is_idle:
                    self._let_go(one)
            self._tell()

    def _let_go(self, member: Member) -> None:
        address = member.client.address
        del self._members[address]
        if self.prefixes is not None:
            self.prefixes.forget(address)
        closing = asyncio.create_task(member.client.close(), name=f"closing {address}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def told(self) -> list[dict[str, Any]]:
        """What /health shows of every engine."""
        return [one.told() for one in self.members]
