"""Protobuf messages drawn from their descriptors: any field, any value that the wire can carry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
_DEEPEST = 6
_MANY = 1000
"""Copies of one value, now and then, of a message if it is small."""
_SMALL = 1000
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_NUMBERS = (0.0, 1.0, 0.5, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan)
_WORDS = (
    "", "a", "demo", "user", "assistant", "tool", "auto", "required", "none", "{}", "[1]", "^a+$",
    "left", "\0", "é🙂", "x" * 5000, '{"type": "object"}', "autoregressive", "10", "start: /a/",
)  # fmt: skip
_BYTES = (b"", b"\1", b"\5\0\0\0\6\0\0\0", b"\xff" * 4, b"\5\0\0\0" * 4000, b"\x80\xff")


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _INTEGERS:
        least, most = _INTEGERS[kind]
        return st.one_of(st.integers(max(least, -2), 20), st.sampled_from([least, most]))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_STRING and field.type == FieldDescriptor.TYPE_BYTES:
        return st.one_of(st.sampled_from(_BYTES), st.binary(max_size=20))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return st.one_of(st.sampled_from(_WORDS), st.text(max_size=20))
    return st.sampled_from(_NUMBERS)


def draw_message(draw: Draw, descriptor: Descriptor, depth: int = 0) -> Any:
    """A message with a few of its fields set, and theirs."""
    message = GetMessageClass(descriptor)()
    if descriptor.fields and depth < _DEEPEST:
        for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=4)):
            _put(draw, message, field, depth)
    return message


def vary(draw: Draw, message: Any, depth: int = 0) -> None:
    """Draws one to three fields anew; of those that hold messages mostly only a part."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    for field in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3)):
        is_one = field.message_type is not None and not field.is_repeated
        if is_one and message.HasField(field.name) and draw(st.integers(0, 9)) < 7:
            vary(draw, getattr(message, field.name), depth + 1)
        else:
            message.ClearField(field.name)
            _put(draw, message, field, depth)


def _put(draw: Draw, message: Any, field: FieldDescriptor, depth: int) -> None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, value = inner.fields_by_name["key"], inner.fields_by_name["value"]
        for _ in range(draw(st.integers(0, 3))):
            entry = getattr(message, field.name)
            if value.message_type is not None:
                made = draw_message(draw, value.message_type, depth + 1)
                entry[draw(_values(key))].CopyFrom(made)
            else:
                entry[draw(_values(key))] = draw(_values(value))
    elif field.is_repeated:
        made = [_one(draw, field, depth) for _ in range(draw(st.integers(0, 3)))]
        is_small = inner is None or (depth == 0 and made and made[0].ByteSize() < _SMALL)
        if is_small and draw(st.integers(0, 9)) == 9:
            made = made[:1] * _MANY
        getattr(message, field.name).extend(made)
    elif inner is not None:
        getattr(message, field.name).SetInParent()
        getattr(message, field.name).CopyFrom(_one(draw, field, depth))
    else:
        setattr(message, field.name, draw(_values(field)))


def _one(draw: Draw, field: FieldDescriptor, depth: int) -> Any:
    if field.message_type is not None:
        return draw_message(draw, field.message_type, depth + 1)
    return draw(_values(field))
