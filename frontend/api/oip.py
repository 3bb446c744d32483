"""The Open Inference Protocol (V2) in plain values: tensors in, a text request out, and back.

https://github.com/kserve/open-inference-protocol. Prompts are elements of the BYTES tensor
`text_input`; parameters are those of /v1/completions, as parameters of the request or as input
tensors of one element. It does not know HTTP or gRPC messages.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError

from frontend.api.finished import check_finished
from frontend.api.not_served import refuse_unserved
from frontend.api.oip_tensors import Tensor, decoded, no_parameter
from frontend.api.openai_request import to_completion
from frontend.api.openai_schema import CompletionBody
from frontend.api.wrong_fields import invalid
from frontend.desk import FrontDesk
from frontend.generation import Generation
from frontend.request import Ingress, TextRequest
from tidemill.runtime.errors import InvalidRequest, NotFound, Unsupported

VERSIONS = ("1",)
PLATFORM = "tidemill"
EXTENSIONS = ("binary_tensor_data", "generate", "model_stream_infer")
TEXT_INPUTS = ("text_input", "prompt")
JSON_INPUT = "sampling_parameters"
"""A tensor, or a parameter, with parameters as a JSON object."""
OUTPUTS = ("text_output", "finish_reason")
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "stream": "generate_stream or ModelStreamInfer, which always stream",
        "stream_options": "generate_stream or ModelStreamInfer",
        "logprobs": "generate with details, or /v1/completions",
        "prompt_logprobs": "/v1/completions",
        "return_token_ids": "/v1/completions",
        "model": "the model's name in the request",
        **dict.fromkeys(TEXT_INPUTS, "the input tensor text_input"),
    }
)
"""Parameters that have no place in an answer of tensors, and what to use instead."""


class Asked(NamedTuple):
    """A request, and the shape of its text tensor, which is that of the answers."""

    request: TextRequest
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What ModelInfer says."""

    model: str
    outputs: list[Tensor]
    parameters: dict[str, int]


def served(desk: FrontDesk, name: str, version: str) -> str:
    """What the model of this name and version is called; raises NotFound."""
    if version not in ("", *VERSIONS):
        raise NotFound(
            f"the model {name!r} has no version {version!r}; it has {', '.join(VERSIONS)}",
            reason="MODEL_NOT_FOUND",
            param="model_version",
        )
    return desk.model_for(name).called(name)


def to_asked(
    model: str, tensors: Sequence[Tensor], parameters: Mapping[str, Any], *, streams: bool = False
) -> Asked:
    """Raises InvalidRequest and Unsupported naming the tensor or parameter."""
    texts = [one for one in tensors if one.name in TEXT_INPUTS]
    if len(texts) != 1:
        raise InvalidRequest(
            f"the request has {len(texts)} text tensors; it needs one BYTES tensor text_input",
            param="inputs",
        )
    (text,) = texts
    if text.datatype != "BYTES":
        raise InvalidRequest(
            f"{text.name} has datatype {text.datatype}; it must be BYTES", param=text.name
        )
    given = dict(parameters)
    for one in tensors:
        if one is not text:
            given |= _parameter(one)
    given = _with_json(given)
    prompts = [decoded(value, text.name) for value in text.values]
    return Asked(to_request(model, prompts, given, streams=streams), text.shape)


def to_request(
    model: str,
    prompts: list[str],
    parameters: Mapping[str, Any],
    *,
    logprobs: bool = False,
    streams: bool = False,
) -> TextRequest:
    """The request that /v1/completions would make of it. A parameter that is not known there is
    refused: here nobody sends fields for other servers. `streams`: the answer is a stream anyway,
    as `stream` may say."""
    parameters = dict(parameters)
    if streams:
        flag(parameters, "stream")
    for name, instead in _ELSEWHERE.items():
        value = parameters.get(name)
        if value is not None and value is not False:
            raise Unsupported(f"{name} is not a parameter here; use {instead}", param=name)
    kept = {name: value for name, value in parameters.items() if name not in _ELSEWHERE}
    excludes = flag(kept, "exclude_input_in_output")
    if excludes is not None:
        kept["echo"] = not excludes
    asked = kept | {"model": model, "prompt": prompts}
    asked |= {"logprobs": 0} if logprobs else {}
    try:
        body = CompletionBody.model_validate(asked)
    except ValidationError as failure:
        raise invalid(failure, asked) from failure
    refuse_unserved(body)
    if body.model_extra:
        name = next(iter(body.model_extra))
        raise Unsupported(
            f"{name[:80]} is neither a parameter nor an input of this model; see "
            "docs/interoperability.md",
            param=name[:80],
        )
    return to_completion(body)


async def infer(desk: FrontDesk, asked: Asked, wanted: Sequence[str], ingress: Ingress) -> Answer:
    """All prompts to their ends; `wanted` are the names of the outputs, or nothing for all."""
    names = check_outputs(wanted)
    async with desk.generation(asked.request, ingress) as generation:
        results = await generation.collect()
    for result in results:
        check_finished(result.finish_reason)
    shape, n = asked.shape, asked.request.options.n
    shape = shape if n == 1 else (math.prod(shape), n)
    columns = {
        "text_output": [result.text.encode() for result in results],
        "finish_reason": [result.finish_reason.encode() for result in results],
    }
    outputs = [Tensor(name, "BYTES", shape, columns[name]) for name in names]
    return Answer(generation.called, outputs, counts(generation))


def counts(generation: Generation) -> dict[str, int]:
    """Tokens, as parameters of an answer."""
    usage = generation.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def check_outputs(wanted: Sequence[str]) -> Sequence[str]:
    """Raises InvalidRequest naming an output that there is not."""
    for name in wanted:
        if name not in OUTPUTS:
            raise InvalidRequest(
                f"there is no output {name[:80]!r}; there are {', '.join(OUTPUTS)}",
                param="outputs",
            )
    return wanted or OUTPUTS


def _parameter(tensor: Tensor) -> dict[str, Any]:
    """A tensor of one element stands for a parameter."""
    if len(tensor.values) != 1:
        raise no_parameter(tensor.name, len(tensor.values))
    value = tensor.values[0]
    if isinstance(value, bytes):
        value = decoded(value, tensor.name)
    return {tensor.name: value}


def flag(given: dict[str, Any], name: str) -> bool | None:
    """Taken out of `given`; None where it is not there. Raises InvalidRequest."""
    value = given.pop(name, None)
    if value not in (None, 0, 1):
        raise InvalidRequest(f"{name} is {reprlib.repr(value)}; it is true or false", param=name)
    return None if value is None else bool(value)


def _with_json(given: dict[str, Any]) -> dict[str, Any]:
    text = given.pop(JSON_INPUT, None)
    if text is None:
        return given
    try:
        inner = orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError) as failure:
        raise InvalidRequest(f"{JSON_INPUT} is not JSON: {failure}", param=JSON_INPUT) from failure
    if not isinstance(inner, dict):
        raise InvalidRequest(f"{JSON_INPUT} must be a JSON object", param=JSON_INPUT)
    return given | inner
