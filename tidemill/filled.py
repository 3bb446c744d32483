"""Messages out of fields, and which of the fields it is that has no place in one.

It knows no message.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

from tidemill.given import described, wrong_kind
from tidemill.runtime.errors import InvalidRequest


def filled(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A message of that kind. Raises InvalidRequest for values of another kind, numbers that its
    fields cannot hold, and text that is none (lone surrogates, as of arguments that are not
    UTF-8). Of what stands in other fields switches are checked by who fills these."""
    _check_switches(kind, fields)
    try:
        return kind(**fields)
    except ValueError as failure:  # which names no field
        place, _ = _misfit(kind, fields)
        raise InvalidRequest(f"{place}: {failure}", param=place.rpartition(".")[2]) from failure
    except TypeError as failure:  # whose words are of how messages are made
        place, value = _misfit(kind, fields)
        raise InvalidRequest(
            f"{place} is {described(value)}, which it cannot hold; pass what the method's"
            " annotations name",
            param=place.rpartition(".")[2],
        ) from failure


def _check_switches(kind: Any, fields: Mapping[str, Any]) -> None:
    """protobuf takes any small number for a bool: a 3, or -1, would be True."""
    for name, value in fields.items():
        field = kind.DESCRIPTOR.fields_by_name.get(name)
        if field is None or field.type != field.TYPE_BOOL or value is None:
            continue
        if isinstance(value, Number) and not isinstance(value, bool):
            raise wrong_kind(name, value, "True or False")


def _misfit(kind: Any, fields: Mapping[str, Any]) -> tuple[str, Any]:
    """The first field, as deep inside as it is, and its value."""
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError):
            place, inner = _inside(kind.DESCRIPTOR.fields_by_name.get(name), value)
            return name + place, inner
    return kind.DESCRIPTOR.name, fields


def _inside(field: Any, value: Any) -> tuple[str, Any]:
    part = field and field.message_type
    if part is None or part.GetOptions().map_entry:
        return "", value
    is_one = isinstance(value, Mapping)
    for i, one in enumerate([value] if is_one else value):
        try:
            part._concrete_class(**one)
        except (TypeError, ValueError):
            place, inner = _misfit(part._concrete_class, one)
            return ("" if is_one else f"[{i}]") + "." + place, inner
    return "", value
