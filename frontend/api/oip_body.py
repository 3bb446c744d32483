"""Bodies of the Open Inference Protocol over HTTP: JSON, with the binary extension of Triton.

In the extension raw tensors stand behind the JSON, whose length a header names
(triton-inference-server/server, docs/protocol/extension_binary_data.md).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson
from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.responses import Response

from frontend.api.http import JsonResponse
from frontend.api.oip import VERSIONS, Answer, flag
from frontend.api.oip_tensors import MAX_DIMENSIONS, MAX_TENSORS, Tensor, checked, pack, unpack
from frontend.api.openai_request import parse
from frontend.api.openai_schema import Body
from tidemill.runtime.errors import InvalidRequest

LENGTH_HEADER = "inference-header-content-length"
_IS_BINARY = "binary_data"
_ALL_BINARY = "binary_data_output"
_SIZE = "binary_data_size"


class InputBody(Body):
    """One input tensor; its data may be nested."""

    name: StrictStr
    datatype: StrictStr
    shape: list[StrictInt] = Field(max_length=MAX_DIMENSIONS)
    parameters: dict[str, Any] | None = None
    values: list[Any] | None = Field(default=None, alias="data")


class OutputBody(Body):
    """One wanted output."""

    name: StrictStr
    parameters: dict[str, Any] | None = None


class InferBody(Body):
    """POST /v2/models/{name}/infer."""

    id: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    inputs: list[InputBody] = Field(min_length=1, max_length=MAX_TENSORS)
    outputs: list[OutputBody] | None = None


class GenerateBody(Body):
    """POST /v2/models/{name}/generate and generate_stream."""

    text_input: StrictStr
    id: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    """Those of /v1/completions, which may stand beside the text too, and `details`."""
    details: StrictBool | None = None
    """Asks for the reason of the end and log-probabilities."""


class Read(NamedTuple):
    """A body as it was read."""

    id: str
    tensors: list[Tensor]
    parameters: dict[str, Any]
    outputs: list[str]
    binary: frozenset[str] | None
    """Outputs that are wanted as raw bytes; None: all."""


def read_infer(content: bytes, headers: Mapping[str, str]) -> Read:
    """Raises InvalidRequest naming the field."""
    length = headers.get(LENGTH_HEADER, "")
    cut = len(content) if not length else _length(length, len(content))
    body = parse(content[:cut], InferBody)
    raw = memoryview(content)[cut:]
    tensors, used = [], 0
    for one in body.inputs:
        size = (one.parameters or {}).get(_SIZE)
        if size is None:
            tensors.append(_of_json(one))
            continue
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if not is_whole or not 0 <= size <= len(raw) - used:
            raise InvalidRequest(
                f"{one.name[:80]}.parameters.{_SIZE} is {reprlib.repr(size)}; it must be a whole "
                f"number, and {len(raw) - used} bytes are left behind the JSON",
                param=_SIZE,
            )
        content_of = bytes(raw[used : used + size])
        tensors.append(unpack(one.name, one.datatype, tuple(one.shape), content_of))
        used += size
    if used != len(raw):
        raise InvalidRequest(f"{len(raw) - used} bytes behind the JSON belong to no input")
    parameters, outputs = dict(body.parameters or {}), body.outputs or []
    is_all = bool(flag(parameters, _ALL_BINARY))
    asked = [(one.name, flag(dict(one.parameters or {}), _IS_BINARY)) for one in outputs]
    named = frozenset(name for name, said in asked if (is_all if said is None else said))
    return Read(
        id=body.id or "",
        tensors=tensors,
        parameters=parameters,
        outputs=[one.name for one in outputs],
        binary=None if is_all and not outputs else named,
    )


def infer_response(answer: Answer, read: Read) -> Response:
    """JSON, or JSON with raw tensors behind it where these were asked for."""
    raw: list[bytes] = []
    outputs = [_output(one, read, raw) for one in answer.outputs]
    content = {
        "model_name": answer.model,
        "model_version": VERSIONS[0],
        **({"id": read.id} if read.id else {}),
        "parameters": answer.parameters,
        "outputs": outputs,
    }
    if not raw:
        return JsonResponse(content)
    head = orjson.dumps(content)
    headers = {LENGTH_HEADER: str(len(head))}
    body = b"".join([head, *raw])
    return Response(body, media_type="application/octet-stream", headers=headers)


def _output(tensor: Tensor, read: Read, raw: list[bytes]) -> dict[str, Any]:
    head: dict[str, Any] = {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": tensor.shape,
    }
    if read.binary is not None and tensor.name not in read.binary:
        return head | {"data": [value.decode() for value in tensor.values]}
    raw.append(pack(tensor.values))
    return head | {"parameters": {_SIZE: len(raw[-1])}}


def _of_json(one: InputBody) -> Tensor:
    if one.values is None:
        raise InvalidRequest(f"{one.name} has neither data nor {_SIZE}", param="data")
    return checked(Tensor(one.name, one.datatype, tuple(one.shape), list(_flat(one.values))))


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def _length(text: str, size: int) -> int:
    if not text.isdecimal() or len(text) > 15 or int(text) > size:
        raise InvalidRequest(
            f"the header {LENGTH_HEADER} is {text[:40]!r}; it must be the length of the JSON in "
            f"the body's {size} bytes",
            param=LENGTH_HEADER,
        )
    return int(text)
