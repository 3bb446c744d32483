"""Makes responses, whole, streamed or in the background, and keeps those that are to be stored.

It does not know routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response

from frontend.api.http import JsonResponse, to_service_error, unless_gone
from frontend.api.query import ResponseQuery
from frontend.api.responses_input import Items, input_items
from frontend.api.responses_log import EventLog
from frontend.api.responses_object import Draft
from frontend.api.responses_request import check_combination, to_request
from frontend.api.responses_schema import ResponsesBody
from frontend.api.responses_stream import ResponseStream
from frontend.api.responses_turns import Turns, to_turns
from frontend.api.sse import EventStream
from frontend.desk import FrontDesk
from frontend.generation import Generation
from frontend.reading import check_tools
from frontend.request import TextRequest
from frontend.shelf import Shelf
from frontend.validation import check_request
from tidemill.runtime.errors import InvalidRequest, ServiceError

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
"""Of all responses that a frontend keeps, with the conversations that led to them."""
_CONTINUED = ("completed", "incomplete")
_RECOUNT_BYTES = 1 << 16
"""How much a log may grow before the shelf hears of it."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A response being made, and the conversation that it answers."""

    draft: Draft
    items: Items
    turns: Turns
    is_stored: bool
    in_background: bool
    log: EventLog | None
    """Its events, where they may be asked for again."""

    @property
    def num_bytes(self) -> int:
        """About what it takes to keep it."""
        texts = (self.draft.to_json(), self.items, self.turns)
        logged = self.log.num_bytes if self.log else 0
        return logged + sum(len(orjson.dumps(text)) for text in texts)


class Asked(NamedTuple):
    """What a body asks for. `turns` is the whole conversation, `before` the response it goes on
    from."""

    request: TextRequest
    turns: Turns
    before: _Work | None


class Responses:
    """All responses of one frontend."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk
        self.shelf: Shelf[_Work] = Shelf(
            "response", "resp", desk.replica, max_entries=MAX_RESPONSES, max_bytes=MAX_BYTES
        )

    def asked(self, body: ResponsesBody) -> Asked:
        """Raises ServiceError for what can be told at once."""
        model = self._desk.model_for(body.model or "")
        check_combination(body, model.facts, model.template.variables)
        before = self._before(body.previous_response_id)
        turns = (*before.turns, before.draft.items.turn()) if before else ()
        turns = to_turns(body.input, turns)
        asked = to_request(body, turns)
        check_request(asked, model.facts, self._desk.config.max_n)
        check_tools(asked, model.output, model.template.variables)
        return Asked(asked, turns, before)

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        """The answer to POST /v1/responses."""
        ingress = request.state.ingress
        asked = self.asked(body)
        name = self._desk.model_for(body.model or "").called(body.model or "")
        work = self._work(body, asked, Draft(body, self.shelf.new_id(), ingress.created, name))
        generation = self._desk.generation(asked.request, ingress)
        stream = ResponseStream(work.draft, lambda: self._keep(work))
        if body.background:
            self.shelf.open(work.draft.name, work, work.num_bytes)
            if work.log is not None:
                work.log.add(stream.queued())
                running = self._run_logged(work, work.log, stream, generation, request)
                self._desk.background.start(work.draft.name, running)
                return EventStream(work.log.read(0), no_end)
            self._desk.background.start(work.draft.name, self._run(work, generation, request))
        elif body.stream:
            return EventStream(stream.events(generation), stream.end)
        else:
            await unless_gone(request.receive, self._write(work, generation))
        return JsonResponse(work.draft.to_json())

    def told(self, name: str, asked: ResponseQuery) -> Response:
        """The answer to GET /v1/responses/ID: the response, or its events."""
        if asked.stream:
            return EventStream(self._events(name, asked.starting_after), no_end)
        if asked.starting_after is not None:
            raise InvalidRequest("starting_after needs stream=true", param="starting_after")
        return JsonResponse(self.shelf.get(name).draft.to_json())

    def _events(self, name: str, starting_after: int | None) -> AsyncGenerator[bytes, None]:
        """The events of a kept response behind number `starting_after`, all that are still to come
        included. Raises NotFound, and InvalidRequest for one whose events are not kept."""
        log = self.shelf.get(name).log
        if log is None:
            raise InvalidRequest(
                f"the events of the response {name} are not kept; they are where a response was "
                "made with background and stream",
                param="stream",
            )
        return log.read(0 if starting_after is None else starting_after + 1)

    async def cancel(self, name: str) -> dict[str, Any]:
        """The response, ended. Raises InvalidRequest for one that has a client waiting."""
        work = self.shelf.get(name)
        if not work.in_background:
            raise InvalidRequest(
                f"the response {name} was not made in the background; others are cancelled by "
                "closing the connection",
                param="id",
            )
        if not work.draft.is_settled:
            work.draft.cancel()
            self._keep(work)
            await self._desk.background.cancel(name)
        return work.draft.to_json()

    def _work(self, body: ResponsesBody, asked: Asked, draft: Draft) -> _Work:
        items = input_items(body.input, draft.suffix)
        if asked.before is not None:
            items = (*asked.before.items, *asked.before.draft.items.output, *items)
        return _Work(
            draft,
            items,
            asked.turns,
            is_stored=body.store is not False,
            in_background=bool(body.background),
            log=EventLog() if body.background and body.stream else None,
        )

    def _before(self, name: str | None) -> _Work | None:
        """The response that a new one continues."""
        if name is None:
            return None
        work = self.shelf.get(name, param="previous_response_id")
        if work.draft.status not in _CONTINUED:
            raise InvalidRequest(
                f"the response {name} is {work.draft.status}; only {' and '.join(_CONTINUED)} ones "
                "can be continued",
                param="previous_response_id",
            )
        return work

    async def _write(self, work: _Work, generation: Generation) -> None:
        draft = work.draft
        async with generation:
            draft.status = "in_progress"
            async for news in generation.deltas():
                for delta in news:
                    draft.feed(delta, generation.usage)
        self._keep(work)

    async def _run(self, work: _Work, generation: Generation, request: Request) -> None:
        """The same with nobody waiting: a failure is kept for whoever asks."""
        try:
            await self._write(work, generation)
        except Exception as failure:
            if not work.draft.is_settled:
                work.draft.fail(to_service_error(failure, request))
                self._keep(work)

    async def _run_logged(
        self,
        work: _Work,
        log: EventLog,
        stream: ResponseStream,
        generation: Generation,
        request: Request,
    ) -> None:
        """The same, event by event, for whoever reads the log."""
        num_counted = 0
        try:
            async with aclosing(stream.events(generation)) as events:
                async for some in events:
                    log.add(some)
                    if not work.draft.is_settled and log.num_bytes > num_counted + _RECOUNT_BYTES:
                        num_counted = log.num_bytes
                        self.shelf.open(work.draft.name, work, work.num_bytes)
            self._keep(work)
        except Exception as failure:
            if not work.draft.is_settled:
                log.add(stream.end(to_service_error(failure, request)))
        except asyncio.CancelledError:
            if not work.draft.is_settled:
                work.draft.cancel()
            log.add(stream.stopped())
            raise
        finally:
            log.close()

    def _keep(self, work: _Work) -> None:
        if work.is_stored:
            self.shelf.settle(work.draft.name, work, work.num_bytes)


def no_end(failure: ServiceError | None) -> bytes:
    """How a log's events end: with the last of them, which tells of a failure too."""
    return b""
