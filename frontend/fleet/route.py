"""The way of one request through the fleet: its engine, and whether it may try another one.

Only a request of which nothing has come back yet goes to another engine; whoever asks has checked
that. Its time goes on. A request whose engines die is not fed to more than two: it may be why.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from frontend.call import Call
from frontend.engine_pool import PoolPrompt, pool_prompt
from frontend.fleet.fleet import Fleet
from frontend.fleet.member import Member
from frontend.fleet.same_model import is_same_model
from frontend.fleet.views import RequestView
from frontend.message_limit import TooLargeForEngine
from frontend.messages import EngineFacts, Usage
from frontend.messages import Sequence as EngineSequence
from tidemill.runtime.errors import (
    GenerationFailed,
    InternalError,
    Overloaded,
    ServiceError,
    Unavailable,
)
from tidemill.telemetry.context import TraceContext

_MOST_LOSSES = 1
_MOST_REFUSALS = 3
_WAIT_S = 2.0
"""How long a request waits for an engine when its own is lost and there is no other."""
_DEAD = "ENGINE_DEAD"


class Route:
    """Of one request, whose token ids are those of the model that `facts` tell of. `session` names
    what belongs together, for policies that keep it so, and `tenant` whom queues are shared by."""

    def __init__(self, fleet: Fleet, facts: EngineFacts, session: str, tenant: str = "") -> None:
        self._fleet = fleet
        self._facts = facts
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
        Unavailable, Overloaded when no engine reads, and InvalidRequest for what none of those
        asked has a message for."""
        while True:
            prompt, salt = sequences[0].prompt, sequences[0].cache_salt
            member = self._choose(prompt, salt)
            source = self._source_for(member, prompt, salt)  # of this engine, not of the one before
            asked = sequences
            if source is not None:
                asked = [replace(one, kv_source=source.client.address) for one in sequences]
            try:
                call = member.client.open(request_id, asked, timeout_ms=timeout_ms, trace=trace)
            except (Overloaded, TooLargeForEngine) as refused:
                if not self._may_try(refused) or not self._leaves(member, refused):
                    raise
                continue
            if source is not None:
                now = asyncio.get_running_loop().time()
                call.when_heard_of(source.picks.add({one.prompt for one in sequences}, now))
            return call

    async def pool(
        self,
        prompt: PoolPrompt,
        *,
        request_id: str,
        remaining_ms: Callable[[], int | None],
        trace: TraceContext | None,
    ) -> tuple[array[float], Usage]:
        """The vector and what it cost, of the first engine that gives them. Raises ServiceError."""
        failure: BaseException | None = None
        try:
            while True:
                member = self._choose(prompt.packed, "")
                try:
                    return await pool_prompt(
                        member.client,
                        prompt,
                        request_id=request_id,
                        timeout_ms=remaining_ms(),
                        trace=trace,
                    )
                except ServiceError as error:
                    if not await self.goes_on(error, remaining_ms()):
                        raise
        except BaseException as why:  # a client that leaves, too: nothing was answered
            failure = why
            raise
        finally:
            self.ended(failure)

    async def goes_on(self, error: ServiceError, remaining_ms: int | None) -> bool:
        """Whether another engine may be asked after `error`, which came before anything else. Of a
        lost engine the same process may be asked again, where there is no other one, and is waited
        for as long as the request has time."""
        member = self._member
        if member is None or self._fleet.is_closing or not self._may_try(error):
            return False
        self._avoided[member.client.address] = error.facts.get("instance_id", "")
        is_lost = "instance_id" in error.facts
        if is_lost and not self._others():
            left_s = math.inf if remaining_ms is None else remaining_ms / 1000
            await self._fleet.wait_ready(min(_WAIT_S, left_s))
        return self._leaves(member, error)

    def _may_try(self, error: ServiceError) -> bool:
        """Whether it is an error of the engine, and has not come too often."""
        if isinstance(error, Overloaded):
            if self._is_overloaded:
                return False
            self._is_overloaded = True
        elif isinstance(error, InternalError) or _is_dead(error):
            if self._num_losses >= _MOST_LOSSES:
                return False
            self._num_losses += 1
        elif not isinstance(error, Unavailable | TooLargeForEngine):
            return False
        else:
            if self._num_refusals >= _MOST_REFUSALS:
                return False
            self._num_refusals += 1
        return True

    def _leaves(self, member: Member, error: ServiceError) -> bool:
        """Whether the request goes from this engine to another one, if there is one."""
        self._avoided.setdefault(member.client.address, "")
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
        if failure is None:
            self._member.outlier.succeeded()
        elif isinstance(failure, GenerationFailed):
            return  # the request is at fault, and nobody else's fails for it
        elif isinstance(failure, InternalError):  # a loss is counted once, with its session
            self._member.outlier.failed(asyncio.get_running_loop().time())

    def _others(self) -> bool:
        return any(not self._is_avoided(one) for one in self._fleet.usable())

    def _is_avoided(self, member: Member) -> bool:
        if self._is_other(member):
            return True
        instance = self._avoided.get(member.client.address)
        return instance is not None and instance != member.client.instance_id

    def _is_other(self, member: Member) -> bool:
        """Whether it is of another model, which may have come in the place of ours while a prompt
        was encoded, waited in an engine that died, or between two rounds of a search."""
        facts = member.client.facts
        return facts is not None and not is_same_model(facts, self._facts)

    def _choose(self, packed: bytes, salt: str) -> Member:
        """The request's engine; a search keeps it from round to round, where its pages are."""
        member = self._member
        if member is None or member.client.state != "ready" or self._is_other(member):
            view = self._view_of(packed, salt)
            member = self._member = self._fleet.pick(view, but_not=self._is_avoided)
            member.num_routed += 1
            if not self._is_counted:
                self._is_counted = True
                self._fleet.live[self._tenant] += 1
        return member

    def _source_for(self, member: Member, packed: bytes, salt: str) -> Member | None:
        """A prefill engine, for a decode engine. None: there is none, or no need: then the prompt
        is computed where it goes on."""
        if member.role != "decode" or not self._fleet.usable(prefills=True):
            return None
        view = self._view_of(packed, salt)
        source = self._fleet.pick(view, but_not=lambda one: False, prefills=True)
        source.num_routed += 1
        return source

    def _view_of(self, packed: bytes, salt: str) -> Callable[[int], RequestView]:
        """What policies see of the request, by its number."""
        prefixes = self._fleet.prefixes

        def view(number: int) -> RequestView:
            hits = {} if prefixes is None else prefixes.hits(packed, salt)
            return RequestView(number, self._session, hits)

        return view


def _is_dead(failure: BaseException) -> bool:
    return isinstance(failure, Unavailable) and failure.reason == _DEAD
