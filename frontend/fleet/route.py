"""The way of one request through the fleet: its engine, and whether it may try another one.

Only a request of which nothing has come back yet goes to another engine; whoever asks has checked
that. Its time goes on. A request whose engines die is not fed to more than two: it may be why.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from frontend.call import Call
from frontend.engine_pool import PoolPrompt, pool_prompt
from frontend.fleet.fleet import Fleet
from frontend.fleet.member import Member
from frontend.fleet.views import RequestView
from frontend.messages import Sequence as EngineSequence
from frontend.messages import Usage
from tidemill.runtime.errors import InternalError, Overloaded, ServiceError, Unavailable
from tidemill.telemetry.context import TraceContext

_MOST_LOSSES = 1
_MOST_REFUSALS = 3
_WAIT_S = 2.0
"""How long a request waits for an engine when its own is lost and there is no other."""
_DEAD = "ENGINE_DEAD"


class Route:
    """Of one request. `session` names what belongs together, for policies that keep it so, and
    `tenant` whom queues are shared by."""

    def __init__(self, fleet: Fleet, session: str, tenant: str = "") -> None:
        self._fleet = fleet
        self._session = session
        self._tenant = tenant
        self._is_counted = False
        self._member: Member | None = None
        self._avoided: dict[str, str] = {}
        """Addresses that failed, with the instance that did."""
        self._num_losses = self._num_refusals = 0
        self._is_overloaded = False

    def open(
        self,
        request_id: str,
        sequences: Sequence[EngineSequence],
        *,
        timeout_ms: int | None,
        trace: TraceContext | None,
    ) -> Call:
        """Submits to the engine of this request, as long as that takes requests. Raises
        Unavailable and Overloaded."""
        member = self._choose(sequences[0].prompt, sequences[0].cache_salt)
        return member.client.open(request_id, sequences, timeout_ms=timeout_ms, trace=trace)

    async def pool(
        self,
        prompt: PoolPrompt,
        *,
        request_id: str,
        remaining_ms: Callable[[], int | None],
        trace: TraceContext | None,
    ) -> tuple[array[float], Usage]:
        """The vector and what it cost, of the first engine that gives them. Raises ServiceError."""
        failure: ServiceError | None = None
        try:
            while True:
                member = self._choose(prompt.packed, "")
                try:
                    answer = await pool_prompt(
                        member.client,
                        prompt,
                        request_id=request_id,
                        timeout_ms=remaining_ms(),
                        trace=trace,
                    )
                    failure = None
                    return answer
                except ServiceError as error:
                    failure = error
                    if not await self.goes_on(error):
                        raise
        finally:
            self.ended(failure)

    async def goes_on(self, error: ServiceError) -> bool:
        """Whether another engine may be asked after `error`, which came before anything else. Of a
        lost engine the same process may be asked again, where there is no other one."""
        member = self._member
        if member is None or not isinstance(error, (Unavailable, Overloaded, InternalError)):
            return False
        if isinstance(error, Overloaded):
            if self._is_overloaded:
                return False
            self._is_overloaded = True
        elif isinstance(error, InternalError) or _is_dead(error):
            if self._num_losses >= _MOST_LOSSES:
                return False
            self._num_losses += 1
        else:
            if self._num_refusals >= _MOST_REFUSALS:
                return False
            self._num_refusals += 1
        self._avoided[member.client.address] = error.facts.get("instance_id", "")
        is_lost = "instance_id" in error.facts
        if is_lost and not self._others():
            await self._fleet.wait_ready(_WAIT_S)
        if not self._others():
            return False
        if isinstance(error, InternalError):
            member.outlier.failed(asyncio.get_running_loop().time())
        member.num_retried += 1
        self._member = None
        return True

    def check_room(self, priority: int) -> None:
        """Raises Overloaded when no engine has room for the request."""
        self._fleet.check_room(self._tenant, priority)

    def ended(self, failure: BaseException | None) -> None:
        """The request is over; its engine is judged by it."""
        if self._is_counted:
            self._is_counted = False
            self._fleet.live -= Counter([self._tenant])
        if self._member is None:
            return
        now = asyncio.get_running_loop().time()
        if failure is None:
            self._member.outlier.succeeded()
        elif isinstance(failure, InternalError) or _is_dead(failure):
            self._member.outlier.failed(now)

    def _others(self) -> bool:
        return any(not self._is_avoided(one) for one in self._fleet.usable())

    def _is_avoided(self, member: Member) -> bool:
        instance = self._avoided.get(member.client.address)
        return instance is not None and instance != member.client.instance_id

    def _choose(self, packed: bytes, salt: str) -> Member:
        """The request's engine; a search keeps it from round to round, where its pages are."""
        member = self._member
        if member is None or member.client.state != "ready":
            prefixes = self._fleet.prefixes

            def view(number: int) -> RequestView:
                hits = {} if prefixes is None else prefixes.hits(packed, salt)
                return RequestView(number, self._session, hits)

            member = self._member = self._fleet.pick(view, but_not=self._is_avoided)
            member.num_routed += 1
            if not self._is_counted:
                self._is_counted = True
                self._fleet.live[self._tenant] += 1
        return member


def _is_dead(failure: BaseException) -> bool:
    return isinstance(failure, Unavailable) and failure.reason == _DEAD
