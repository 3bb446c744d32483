"""Checks of the knobs that a request gives to its decoding method. It knows no method."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from tidemill.runtime.errors import InvalidRequest

_MOST_SHOWN = 60
"""Characters of a wrong value in an error."""


def wrong_knob(name: str, value: Any, wording: str) -> InvalidRequest:
    """The error for a knob whose value is not allowed."""
    return InvalidRequest(
        f"The decoding parameter {name} is {_shown(value)}; it must be {wording}.",
        param=f"decoding.params.{name}",
    )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes down no integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def _is_finite(value: float) -> bool:
    """An integer that no float can hold is not: Python knows them of any size."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def reject_unknown(
    knobs: dict[str, Any], params: type, method: str, *, beside: tuple[str, ...] = ()
) -> None:
    """Raises InvalidRequest naming the first knob, by name since those of a protobuf come in any
    order, that `params` has no field for and that is not among those `beside` them."""
    own = [field.name for field in fields(params)]
    known = [*own, *(name for name in beside if name not in own)]
    unknown = min(knobs.keys() - set(known), default=None)
    if unknown is None:
        return
    served = f"it knows: {', '.join(known)}" if known else "it has none, so leave it out"
    raise InvalidRequest(
        f"Unknown decoding parameter {unknown!r} of {method}; {served}.",
        reason="UNKNOWN_PARAMETER",
        param=f"decoding.params.{unknown}",
    )


def read_number(name: str, value: Any, *, low: float, high: float = math.inf) -> float:
    """A finite number in [low, high]."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_real and _is_finite(value) and low <= value <= high):
        limits = f"of at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise wrong_knob(name, value, f"a finite number {limits}")
    return float(value)


def read_whole(name: str, value: Any, *, low: int, high: int, most: str = "") -> int:
    """A whole number in [low, high]; 4.0 is one, because JSON and protobuf know only numbers.
    `most`: what the error calls the upper bound, where another than `high` is checked later."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_real and low <= value <= high and value == int(value)):
        raise wrong_knob(name, value, f"a whole number in [{low}, {most or high}]")
    return int(value)


def read_flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong_knob(name, value, "true or false")
    return value


def read_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of `choices`."""
    if not (isinstance(value, str) and value in choices):
        raise wrong_knob(name, value, f"one of {', '.join(choices)}")
    return value
