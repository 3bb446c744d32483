"""What is wrong with a field, in words that name it. It does not know bodies."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tidemill.runtime.errors import InvalidRequest

Place = tuple[int | str, ...]
"""Where in the JSON a fault is: names of fields, and numbers of a list's entries."""
_EXPECTED = "Input should be "


def invalid(failure: ValidationError, given: Any) -> InvalidRequest:
    """The first fault of what was `given`, which names its field.

    Where a field may be of several types there is a fault for each of them. The one that is told
    lies deepest, in the type that was meant: of a list the entry, not that it is no text.
    """
    faults = failure.errors(include_url=False, include_context=False)
    field = _place(faults[0], given)
    there = [(_place(fault, given), fault) for fault in faults]
    there = [one for one in there if one[0][: len(field)] == field]
    place, fault = max(there, key=lambda one: (len(one[0]), not _is_of_type(one[1])))
    said = _said(fault, [other for at, other in there if at == place])
    param = _path(place)
    value = "" if fault["type"] == "missing" else f" (got {short(fault['input'])})"
    return InvalidRequest(f"{param}: {said}{value}", param=param)


def short(value: object) -> str:
    """A value of any size, to be told."""
    text = reprlib.repr(value)  # repr itself fails on what is nested 1000 times
    return text if len(text) <= 80 else text[:77] + "..."


def _said(fault: ErrorDetails, here: Sequence[ErrorDetails]) -> str:
    """What a fault says, and where the value has none of several types, all of them."""
    is_huge = isinstance(fault["input"], float) and abs(fault["input"]) >= 2**63
    if fault["type"] == "int_type" and is_huge:  # JSON's reader makes such a float
        return f"{_EXPECTED}an integer of at most 64 bits"
    if not _is_of_type(fault):
        return fault["msg"]
    kinds = [one["msg"].removeprefix(_EXPECTED) for one in here if _is_of_type(one)]
    return _EXPECTED + " or ".join(dict.fromkeys(kinds))


def _is_of_type(fault: ErrorDetails) -> bool:
    return fault["type"].endswith("_type") and fault["msg"].startswith(_EXPECTED)


def _place(fault: ErrorDetails, given: Any) -> Place:
    """pydantic's location without the names of the types that it tried, which are no fields."""
    place: list[int | str] = []
    for part in fault["loc"]:
        is_number = isinstance(part, int) and isinstance(given, list)
        if is_number or (isinstance(given, dict) and part in given):
            given = given[part]
            place.append(part)
    return (*place, *fault["loc"][-1:]) if fault["type"] == "missing" else tuple(place)


def _path(place: Place) -> str:
    """messages[0].content; what is no name ends it."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
        else:
            break
    return path or "body"
