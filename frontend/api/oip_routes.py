"""/v2: the Open Inference Protocol over HTTP, with its extension for generated text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.api.bodies import read_body
from frontend.api.document import documented
from frontend.api.envelopes import oip_error
from frontend.api.finished import check_finished
from frontend.api.http import JsonResponse, unless_gone
from frontend.api.oip import (
    EXTENSIONS,
    OUTPUTS,
    PLATFORM,
    TEXT_INPUTS,
    VERSIONS,
    flag,
    infer,
    served,
    to_asked,
    to_request,
)
from frontend.api.oip_body import GenerateBody, InferBody, infer_response, read_infer
from frontend.api.openai_request import parse
from frontend.api.sse import EventStream, event
from frontend.desk import FrontDesk
from frontend.generation import Generation
from frontend.request import Ingress, TextRequest
from frontend.text_delta import TextLogprob
from frontend.validation import check_streamed
from tidemill import __version__
from tidemill.runtime.errors import ServiceError, Unsupported

_MODEL = "/v2/models/{name:path}"
_VERSION = "/versions/{version}"


def oip_routes(desk: FrontDesk) -> APIRouter:
    """The router. Names may have slashes, so paths with something behind the name come first."""
    router = APIRouter()

    async def run_infer(request: Request, name: str, version: str = "") -> Response:
        """Text for tensors of prompts."""
        content = await read_body(request, desk.config.max_body_bytes)
        read = read_infer(content, request.headers)
        model = served(desk, name, version)
        asked = to_asked(model, read.tensors, read.parameters)
        work = infer(desk, asked, read.outputs, request.state.ingress)
        return infer_response(await unless_gone(request.receive, work), read)

    async def generate(request: Request, name: str, version: str = "") -> Response:
        """Text for one prompt."""
        body = parse(await read_body(request, desk.config.max_body_bytes), GenerateBody)
        served(desk, name, version)
        wanted, details = _wanted(body, name)
        work = _generate(desk, wanted, details, body, request.state.ingress)
        return JsonResponse(await unless_gone(request.receive, work))

    async def generate_stream(request: Request, name: str, version: str = "") -> Response:
        """The same in pieces, as events."""
        body = parse(await read_body(request, desk.config.max_body_bytes), GenerateBody)
        served(desk, name, version)
        wanted, details = _wanted(body, name, streams=True)
        check_streamed(wanted.options)
        stream = _stream(desk, wanted, details, body, request.state.ingress)
        return EventStream(stream, _end)

    async def model_ready(name: str, version: str = "") -> Response:
        """200 while the model takes requests."""
        return JsonResponse({"name": served(desk, name, version), "ready": True})

    async def model_metadata(name: str, version: str = "") -> Response:
        """What the model takes and answers."""
        return JsonResponse(metadata(served(desk, name, version)))

    _add_server_routes(router, desk)
    for path in (f"{_MODEL}{_VERSION}", _MODEL):
        router.post(f"{path}/infer", openapi_extra=documented(InferBody))(run_infer)
        router.post(f"{path}/generate", openapi_extra=documented(GenerateBody))(generate)
        stream_path = f"{path}/generate_stream"
        router.post(stream_path, openapi_extra=documented(GenerateBody))(generate_stream)
        router.get(f"{path}/ready")(model_ready)
    for path in (f"{_MODEL}{_VERSION}", _MODEL):
        router.get(path)(model_metadata)
    return router


def _add_server_routes(router: APIRouter, desk: FrontDesk) -> None:
    @router.get("/v2")
    async def server_metadata() -> Response:
        """Name, version and extensions of this server."""
        about = {"name": PLATFORM, "version": __version__, "extensions": EXTENSIONS}
        return JsonResponse(about)

    @router.get("/v2/health/live")
    async def live() -> Response:
        """200 while the process runs."""
        return JsonResponse({"live": True})

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        """200 while requests are taken."""
        if desk.state == "ready":
            return JsonResponse({"ready": True})
        return JsonResponse({"ready": False}, status_code=503, headers={"retry-after": "1"})


def metadata(name: str) -> dict[str, Any]:
    """Inputs and outputs; -1 is any size."""
    outputs = [{"name": one, "datatype": "BYTES", "shape": [-1]} for one in OUTPUTS]
    return {
        "name": name,
        "versions": VERSIONS,
        "platform": PLATFORM,
        "inputs": [{"name": TEXT_INPUTS[0], "datatype": "BYTES", "shape": [-1]}],
        "outputs": outputs,
    }


def _wanted(body: GenerateBody, name: str, *, streams: bool = False) -> tuple[TextRequest, bool]:
    parameters = (body.model_extra or {}) | (body.parameters or {})
    details = bool(flag(parameters, "details") or body.details)
    wanted = to_request(name, [body.text_input], parameters, logprobs=details, streams=streams)
    if wanted.options.n != 1:
        raise Unsupported("n: generate answers with one text; use infer", param="n")
    return wanted, details


async def _generate(
    desk: FrontDesk, wanted: TextRequest, details: bool, body: GenerateBody, ingress: Ingress
) -> dict[str, Any]:
    async with desk.generation(wanted, ingress) as generation:
        (result,) = await generation.collect()
    check_finished(result.finish_reason)
    answer = _head(generation.called, body) | {"text_output": result.text}
    if details:
        tokens = _tokens(result.logprobs, generation)
        reason = _reason(result.finish_reason, result.stop_reason)
        answer["details"] = {"finish_reason": reason, "logprobs": tokens}
    return answer


async def _stream(
    desk: FrontDesk, wanted: TextRequest, details: bool, body: GenerateBody, ingress: Ingress
) -> AsyncGenerator[bytes, None]:
    async with desk.generation(wanted, ingress) as generation:
        head = _head(generation.called, body)
        async for news in generation.deltas():
            for delta in news:
                check_finished(delta.finish_reason or "")
                if not (delta.text or delta.finish_reason or (details and delta.logprobs)):
                    continue
                chunk = head | {"text_output": delta.text}
                if details:
                    tokens = _tokens(delta.logprobs, generation)
                    reason = _reason(delta.finish_reason, delta.stop_reason)
                    last = tokens[-1] if tokens else None
                    chunk["details"] = {
                        "finish_reason": reason, "token": last, "logprobs": tokens,
                    }  # fmt: skip
                yield event(chunk)


def _head(model: str, body: GenerateBody) -> dict[str, Any]:
    named = {} if body.id is None else {"id": body.id}
    return {"model_name": model, "model_version": VERSIONS[0], **named}


def _reason(finish_reason: str | None, stop_reason: object) -> str | None:
    """In the protocol's words."""
    if finish_reason != "stop":
        return finish_reason
    return "eos_token" if stop_reason is None else "stop_sequence"


def _tokens(entries: Sequence[TextLogprob], generation: Generation) -> list[dict[str, Any]]:
    special = generation.model.tokenizer.special_ids
    return [
        {
            "id": entry.token_id,
            "text": entry.token,
            "logprob": entry.logprob,
            "special": entry.token_id in special,
        }
        for entry in entries
    ]


def _end(error: ServiceError | None) -> bytes:
    return b"" if error is None else event(oip_error(error))
