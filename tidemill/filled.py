"""Messages out of fields, and which of the fields it is that has no place in one.

It knows no message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.runtime.errors import InvalidRequest


def filled(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A message of that kind. Raises InvalidRequest for numbers that its fields cannot hold, and
    for text that is none (lone surrogates, as of arguments that are not UTF-8)."""
    try:
        return kind(**fields)
    except ValueError as failure:  # which names no field
        place = _misfit(kind, fields)
        raise InvalidRequest(f"{place}: {failure}", param=place.rpartition(".")[2]) from failure


def _misfit(kind: Any, fields: Mapping[str, Any]) -> str:
    """The first field, as deep inside as it is."""
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except ValueError:
            return name + _inside(kind.DESCRIPTOR.fields_by_name.get(name), value)
    return kind.DESCRIPTOR.name  # type: ignore[no-any-return]


def _inside(field: Any, value: Any) -> str:
    part = field and field.message_type
    if part is None or part.GetOptions().map_entry:
        return ""
    is_one = isinstance(value, Mapping)
    for i, one in enumerate([value] if is_one else value):
        try:
            part._concrete_class(**one)
        except ValueError:
            return ("" if is_one else f"[{i}]") + "." + _misfit(part._concrete_class, one)
    return ""
