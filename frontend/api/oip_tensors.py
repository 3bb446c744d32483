"""Tensors of the Open Inference Protocol: what one may be, and its bytes. It knows no requests."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from frontend.validation import MAX_PROMPTS
from tidemill.runtime.errors import InvalidRequest, Unsupported

MAX_DIMENSIONS = 8
MAX_TENSORS = 256
"""The text and its parameters, of which there are fewer."""
NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b",
        "INT16": "h", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
    }
)  # fmt: skip
"""Data types of one size each, as `struct` names them."""


class Tensor(NamedTuple):
    """`values` are flattened: bytes of BYTES, otherwise numbers and booleans."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


def unpack(name: str, datatype: str, shape: tuple[int, ...], content: bytes) -> Tensor:
    """A tensor of texts that each stand behind their length, or of one little-endian number. More
    of them than can be used are refused before they are read."""
    if datatype == "BYTES":
        texts = list(islice(_texts(name, content), MAX_PROMPTS + 1))
        return checked(Tensor(name, datatype, shape, texts))
    kind = _kind_of(name, datatype)
    size = struct.calcsize(f"<{kind}")
    if len(content) % size:
        raise InvalidRequest(
            f"{name} has {len(content)} bytes, which is no multiple of {size}", param=name
        )
    if len(content) > size:
        raise no_parameter(name, len(content) // size)
    values = struct.unpack(f"<{len(content) // size}{kind}", content)
    return checked(Tensor(name, datatype, shape, values))


def pack(values: Sequence[bytes]) -> bytes:
    """Elements of a BYTES tensor, each behind its length."""
    return b"".join([len(value).to_bytes(4, "little") + value for value in values])


def checked(tensor: Tensor) -> Tensor:
    """Raises InvalidRequest unless it has as many values as its shape says, and no more than can
    be used, and Unsupported for a datatype that nobody knows."""
    if tensor.datatype != "BYTES":
        _kind_of(tensor.name, tensor.datatype)
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


def check_count(num_tensors: int) -> None:
    """Raises InvalidRequest for more tensors than there are names for: reading them one by one
    would hold up everybody."""
    if num_tensors > MAX_TENSORS:
        raise InvalidRequest(
            f"the request has {num_tensors} input tensors; it may have {MAX_TENSORS}",
            param="inputs",
        )


def _kind_of(name: str, datatype: str) -> str:
    """What `struct` calls a number. Raises Unsupported for what is none."""
    kind = NUMBERS.get(datatype)
    if kind is None:
        raise Unsupported(
            f"{name[:80]} has datatype {datatype[:40]}; it must be BYTES or one of "
            f"{', '.join(NUMBERS)}",
            param=name[:80],
        )
    return kind


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


def no_parameter(name: str, num_values: int) -> InvalidRequest:
    """Of a tensor that stands for one, and has so many values."""
    return InvalidRequest(
        f"the input {name[:80]} has {num_values} values; a parameter has one, and the text stands "
        "in text_input",
        param=name[:80],
    )


def decoded(value: Any, name: str) -> str:
    """A value as text. Raises InvalidRequest."""
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
