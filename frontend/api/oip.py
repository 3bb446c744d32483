"""The Open Inference Protocol (V2) in plain values: tensors in, a text request out, and back.

https://github.com/kserve/open-inference-protocol. Prompts are elements of the BYTES tensor
`text_input`; parameters are those of /v1/completions, as parameters of the request or as input
tensors of one element. It does not know HTTP or gRPC messages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError

from frontend.api.finished import check_finished
from frontend.api.not_served import refuse_unserved
from frontend.api.openai_request import invalid, to_completion
from frontend.api.openai_schema import CompletionBody
from frontend.desk import FrontDesk
from frontend.generation import Generation
from frontend.request import Ingress, TextRequest
from frontend.validation import MAX_PROMPTS
from tidemill.runtime.errors import InvalidRequest, NotFound, Unsupported

VERSIONS = ("1",)
PLATFORM = "tidemill"
EXTENSIONS = ("binary_tensor_data", "generate", "model_stream_infer")
TEXT_INPUTS = ("text_input", "prompt")
MAX_DIMENSIONS = 8
JSON_INPUT = "sampling_parameters"
"""A tensor, or a parameter, with parameters as a JSON object."""
OUTPUTS = ("text_output", "finish_reason")
NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b",
        "INT16": "h", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
    }
)  # fmt: skip
"""Data types of one size each, as `struct` names them."""
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


class Tensor(NamedTuple):
    """`values` are flattened: bytes of BYTES, otherwise numbers and booleans."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


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


def to_asked(model: str, tensors: Sequence[Tensor], parameters: Mapping[str, Any]) -> Asked:
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
    prompts = [_decoded(value, text.name) for value in text.values]
    return Asked(to_request(model, prompts, given), text.shape)


def to_request(
    model: str, prompts: list[str], parameters: Mapping[str, Any], *, logprobs: bool = False
) -> TextRequest:
    """The request that /v1/completions would make of it. A parameter that is not known there is
    refused: here nobody sends fields for other servers."""
    for name, instead in _ELSEWHERE.items():
        if parameters.get(name) not in (None, False):
            raise Unsupported(f"{name} is not a parameter here; use {instead}", param=name)
    kept = {name: value for name, value in parameters.items() if name not in _ELSEWHERE}
    asked = kept | {"model": model, "prompt": prompts}
    try:
        body = CompletionBody.model_validate(asked | ({"logprobs": 0} if logprobs else {}))
    except ValidationError as failure:
        raise invalid(failure) from failure
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


# ---------------------------------------------------------------- raw contents


def unpack(name: str, datatype: str, shape: tuple[int, ...], content: bytes) -> Tensor:
    """A tensor of texts that each stand behind their length, or of one little-endian number. More
    of them than can be used are refused before they are read."""
    if datatype == "BYTES":
        texts = list(islice(_texts(name, content), MAX_PROMPTS + 1))
        return checked(Tensor(name, datatype, shape, texts))
    kind = NUMBERS.get(datatype)
    if kind is None:
        raise Unsupported(
            f"{name} has datatype {datatype[:40]}; it must be BYTES or one of {', '.join(NUMBERS)}",
            param=name,
        )
    size = struct.calcsize(f"<{kind}")
    if len(content) % size:
        raise InvalidRequest(
            f"{name} has {len(content)} bytes, which is no multiple of {size}", param=name
        )
    if len(content) > size:
        raise _no_parameter(name, len(content) // size)
    values = struct.unpack(f"<{len(content) // size}{kind}", content)
    return checked(Tensor(name, datatype, shape, values))


def pack(values: Sequence[bytes]) -> bytes:
    """Elements of a BYTES tensor, each behind its length."""
    return b"".join([len(value).to_bytes(4, "little") + value for value in values])


def checked(tensor: Tensor) -> Tensor:
    """Raises InvalidRequest unless it has as many values as its shape says, and no more than can
    be used."""
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise InvalidRequest(
            f"{tensor.name} has {len(tensor.shape)} dimensions; it may have {MAX_DIMENSIONS}",
            param=tensor.name,
        )
    if len(tensor.values) > MAX_PROMPTS:
        raise InvalidRequest(
            f"{tensor.name} has more than {MAX_PROMPTS} values; send fewer in one request",
            param=tensor.name,
        )
    if math.prod(tensor.shape) != len(tensor.values) or min(tensor.shape, default=1) < 0:
        raise InvalidRequest(
            f"{tensor.name} has {len(tensor.values)} values, which do not make its shape "
            f"{list(tensor.shape)}",
            param=tensor.name,
        )
    return tensor


def _texts(name: str, content: bytes) -> Any:
    start = 0
    while start < len(content):
        stop = start + 4 + int.from_bytes(content[start : start + 4], "little")
        if stop > len(content):
            raise InvalidRequest(
                f"{name} ends inside of a text: each stands behind its length in 4 bytes",
                param=name,
            )
        yield content[start + 4 : stop]
        start = stop


# ---------------------------------------------------------------- parameters


def _parameter(tensor: Tensor) -> dict[str, Any]:
    """A tensor of one element stands for a parameter."""
    if len(tensor.values) != 1:
        raise _no_parameter(tensor.name, len(tensor.values))
    value = tensor.values[0]
    if isinstance(value, bytes):
        value = _decoded(value, tensor.name)
    if tensor.name == "exclude_input_in_output":
        return {"echo": not value}
    return {tensor.name: value}


def _no_parameter(name: str, num_values: int) -> InvalidRequest:
    return InvalidRequest(
        f"the input {name[:80]} has {num_values} values; a parameter has one, and the text stands "
        "in text_input",
        param=name[:80],
    )


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


def _decoded(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        text = f"{name[:80]} has a value that is no text but {type(value).__name__}"
        raise InvalidRequest(text, param=name[:80])
    try:
        return value.decode()
    except UnicodeDecodeError as failure:
        text = f"{name[:80]} is not UTF-8 text: {failure}"
        raise InvalidRequest(text, param=name[:80]) from failure
