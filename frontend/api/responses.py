"""/v1/responses: making responses, keeping them, and asking for them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.api.document import documented
from frontend.api.http import JsonResponse, read_body, to_service_error, unless_gone
from frontend.api.openai_request import parse
from frontend.api.responses_object import Draft
from frontend.api.responses_request import check_combination, to_request
from frontend.api.responses_schema import ResponsesBody
from frontend.api.responses_stream import ResponseStream
from frontend.api.responses_turns import Turns, to_turns
from frontend.api.sse import EventStream
from frontend.desk import FrontDesk
from frontend.generation import Generation
from frontend.reading import check_tools
from frontend.request import Chat, TextRequest
from frontend.shelf import Shelf
from frontend.validation import check_request
from tidemill.runtime.errors import InvalidRequest, Unsupported

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
"""Of all responses that a frontend keeps, with the conversations that led to them."""
_CONTINUED = ("completed", "incomplete")


@dataclass(frozen=True, slots=True)
class _Work:
    """A response being made, and the conversation that it answers."""

    draft: Draft
    turns: Turns
    is_stored: bool
    in_background: bool


def responses_routes(desk: FrontDesk) -> APIRouter:
    """The router."""
    router, kept = APIRouter(), _Responses(desk)

    @router.post("/v1/responses", openapi_extra=documented(ResponsesBody))
    async def create_response(request: Request) -> Response:
        """Answers a conversation: whole, as a stream of events, or in the background."""
        body = parse(await read_body(request, desk.config.max_body_bytes), ResponsesBody)
        return await kept.create(body, request)

    @router.post("/v1/responses/input_tokens", openapi_extra=documented(ResponsesBody))
    async def count_tokens(request: Request) -> Response:
        """How long the prompt of a response is."""
        body = parse(await read_body(request, desk.config.max_body_bytes), ResponsesBody)
        asked, _ = kept.asked(body)
        (chat,) = asked.prompts
        assert isinstance(chat, Chat), "a response to a text"
        token_ids = await desk.tokenize(desk.model_for(body.model or ""), chat, None)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    @router.get("/v1/responses/{name}")
    async def get_response(name: str, request: Request) -> Response:
        """A response that this frontend keeps."""
        if request.query_params.get("stream", "false") != "false":
            raise Unsupported(
                "stream: a kept response is not streamed again; leave stream out", param="stream"
            )
        return JsonResponse(kept.shelf.get(name).draft.to_json())

    @router.post("/v1/responses/{name}/cancel")
    async def cancel_response(name: str) -> Response:
        """Ends a response in the background; one that has ended is answered as it is."""
        return JsonResponse(await kept.cancel(name))

    @router.delete("/v1/responses/{name}")
    async def delete_response(name: str) -> Response:
        """Forgets a response; one that is still being made ends."""
        kept.shelf.remove(name)
        await desk.background.cancel(name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})

    return router


class _Responses:
    """Makes responses and keeps those that are to be stored."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk
        self.shelf: Shelf[_Work] = Shelf(
            "response", "resp", desk.replica, max_entries=MAX_RESPONSES, max_bytes=MAX_BYTES
        )

    def asked(self, body: ResponsesBody) -> tuple[TextRequest, Turns]:
        """The request, and its conversation. Raises ServiceError for what can be told at once."""
        model = self._desk.model_for(body.model or "")
        check_combination(body, model.facts)
        turns = to_turns(body.input, self._before(body.previous_response_id))
        asked = to_request(body, turns)
        check_request(asked, model.facts, self._desk.config.max_n)
        check_tools(asked, model.output, model.template.variables)
        return asked, turns

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        """The answer to POST /v1/responses."""
        ingress = request.state.ingress
        asked, turns = self.asked(body)
        name = self._desk.model_for(body.model or "").name
        draft = Draft(body, self.shelf.new_id(), ingress.created, name)
        work = _Work(draft, turns, body.store is not False, bool(body.background))
        generation = self._desk.generation(asked, ingress)
        if body.stream:
            stream = ResponseStream(draft, lambda: self._keep(work))
            return EventStream(stream.events(generation), stream.end)
        if body.background:
            self.shelf.open(draft.name, work, _num_bytes(work))
            self._desk.background.start(draft.name, self._run(work, generation, request))
        else:
            await unless_gone(request.receive, self._write(work, generation))
        return JsonResponse(draft.to_json())

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

    def _before(self, name: str | None) -> Turns:
        """The conversation that a new response continues."""
        if name is None:
            return ()
        work = self.shelf.get(name, param="previous_response_id")
        if work.draft.status not in _CONTINUED:
            raise InvalidRequest(
                f"the response {name} is {work.draft.status}; only {' and '.join(_CONTINUED)} ones "
                "can be continued",
                param="previous_response_id",
            )
        return (*work.turns, work.draft.items.turn())

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

    def _keep(self, work: _Work) -> None:
        if work.is_stored:
            self.shelf.settle(work.draft.name, work, _num_bytes(work))


def _num_bytes(work: _Work) -> int:
    return len(orjson.dumps(work.draft.to_json())) + len(orjson.dumps(work.turns))
