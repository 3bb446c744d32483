"""Texts that are asked for now and fetched later: /v1/generate, /v1/generate_batch, /v1/result/ID.

Results stand in the memory of the frontend that took the request, for a while: clients behind a
balancer must come back to the same one, and hear which one it is when they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import orjson
from fastapi import APIRouter, Request
from pydantic import Field, StrictFloat, StrictInt
from starlette.responses import Response

from frontend.api.bodies import read_body
from frontend.api.document import documented
from frontend.api.envelopes import openai_error
from frontend.api.finished import check_finished
from frontend.api.http import JsonResponse, to_service_error
from frontend.api.openai_request import parse, to_decoding, to_seed
from frontend.api.openai_response import usage_of
from frontend.api.openai_schema import Body, DecodingBody, Int32
from frontend.desk import FrontDesk
from frontend.generation import Generation
from frontend.request import Options, Sampling, TextRequest
from frontend.shelf import Shelf
from frontend.validation import MAX_PROMPTS, check_request

MAX_RESULTS = 4096
MAX_BYTES = 64 << 20
KEEP_S = 3600.0
"""How many results a frontend keeps, how large together, and how long after they are finished."""
DEFAULT_LENGTH = 32


class JobBody(Body):
    """What both ways to ask have in common. The text is as long as gen_length at most."""

    other_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "max_tokens": "gen_length",
            "max_new_tokens": "gen_length",
            "max_completion_tokens": "gen_length",
            "sparse_config": "decoding.params",
            "sparse_configs": "decoding.params, in a request for each prompt",
        }
    )

    model: str | None = None
    temperature: StrictFloat | None = None
    """0 if it is not given: the likeliest token."""
    gen_length: Annotated[Int32, Field(ge=1)] | None = None
    """32 if it is not given."""
    seed: StrictInt | None = None
    decoding: DecodingBody | None = None
    """Decoding method and its knobs."""


class GenerateBody(JobBody):
    """POST /v1/generate."""

    prompt: str


class GenerateBatchBody(JobBody):
    """POST /v1/generate_batch: one result for each prompt."""

    prompts: list[str] = Field(min_length=1, max_length=MAX_PROMPTS)


@dataclass(slots=True, eq=False)
class _Job:
    """One text being made; `answer` is there when it is finished or has failed. What was asked for
    is not kept with it."""

    num_asked: int
    """Bytes of what was asked for."""
    answer: dict[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        return self.num_asked if self.answer is None else len(orjson.dumps(self.answer))


def job_routes(desk: FrontDesk) -> APIRouter:
    """The router."""
    router, jobs = APIRouter(), _Jobs(desk)

    @router.post("/v1/generate", openapi_extra=documented(GenerateBody))
    async def generate(request: Request) -> Response:
        """Begins one text."""
        body = parse(await read_body(request, desk.config.max_body_bytes), GenerateBody)
        return jobs.submit(body, [body.prompt], "prompt", request)

    @router.post("/v1/generate_batch", openapi_extra=documented(GenerateBatchBody))
    async def generate_batch(request: Request) -> Response:
        """Begins a text for every prompt: all of them, or none."""
        body = parse(await read_body(request, desk.config.max_body_bytes), GenerateBatchBody)
        return jobs.submit(body, body.prompts, "prompts", request)

    @router.get("/v1/result/{name}")
    async def result(name: str) -> Response:
        """What has become of a text."""
        waiting = {"status": "running", "text": None}
        return JsonResponse({"request_id": name, **(jobs.shelf.get(name).answer or waiting)})

    @router.delete("/v1/result/{name}")
    async def delete_result(name: str) -> Response:
        """Forgets a text; one that is still being made ends."""
        jobs.shelf.remove(name)
        await desk.background.cancel(name)
        return JsonResponse({"request_id": name, "status": "deleted"})

    return router


class _Jobs:
    """Begins texts and keeps what comes out."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk
        self.shelf: Shelf[_Job] = Shelf(
            "result",
            "gen",
            desk.replica,
            max_entries=MAX_RESULTS,
            max_bytes=MAX_BYTES,
            keep_s=KEEP_S,
        )

    def submit(self, body: JobBody, prompts: list[str], param: str, request: Request) -> Response:
        """The names of the texts, which begin at once."""
        model = self._desk.model_for(body.model or "")
        asked = [_to_request(body, text, param) for text in prompts]
        for one in asked:
            check_request(one, model.facts, self._desk.config.max_n)
        num_beside = len(orjson.dumps(body.decoding.params)) if body.decoding else 0
        jobs = {self.shelf.new_id(): _Job(num_beside + len(text.encode())) for text in prompts}
        self.shelf.check_room(len(jobs), sum(job.num_bytes for job in jobs.values()))
        for name, job in jobs.items():
            self.shelf.open(name, job, job.num_bytes)
        for (name, job), one in zip(jobs.items(), asked, strict=True):
            ingress = replace(request.state.ingress, request_id=name)
            generation = self._desk.generation(one, ingress)
            self._desk.background.start(name, self._run(name, job, generation, request))
        return JsonResponse({"request_ids": list(jobs), "status": "submitted"})

    async def _run(self, name: str, job: _Job, generation: Generation, request: Request) -> None:
        try:
            async with generation:
                (result,) = await generation.collect()
            check_finished(result.finish_reason)
            job.answer = {
                "status": "finished",
                "text": result.text,
                "finish_reason": result.finish_reason,
                "usage": usage_of(generation.usage),
            }
        except Exception as failure:
            error = openai_error(to_service_error(failure, request))
            job.answer = {"status": "failed", "text": None, **error}
        self.shelf.settle(name, job, job.num_bytes)


def _to_request(body: JobBody, prompt: str, param: str) -> TextRequest:
    sampling = Sampling(
        temperature=0.0 if body.temperature is None else body.temperature,
        seed=to_seed(body.seed),
        max_tokens=DEFAULT_LENGTH if body.gen_length is None else body.gen_length,
    )
    options = Options(
        model=body.model or "", sampling=sampling, decoding=to_decoding(body.decoding)
    )
    return TextRequest(
        prompts=(prompt,),
        options=options,
        prompt_param=param,
        names={"max_tokens": "gen_length"},
    )
