"""Numbers of rotary parameters, as config.json says them. It does not know what they mean."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from tidemill.runtime.errors import InvalidRequest

_LEAST, MOST = 1e-38, 1e38
"""What float32 holds; float64 then holds products and quotients of two."""


def number(raw: Mapping[str, Any], key: str, default: float, *, above: float = 0) -> float:
    """A number above `above`, of a size that is neither 0 nor infinite in float32: with others
    angles are NaN, stand still or turn the other way, which nobody would see but in the texts."""
    value = raw.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value:
        raise wrong_number(key, value, f"above {above}")
    if not _LEAST <= value <= MOST:
        raise wrong_number(key, value, f"in [{_LEAST:g}, {MOST:g}], which float32 holds")
    return float(value)


def wrong_number(key: str, value: object, wording: str) -> InvalidRequest:
    """The error for a value that no angle comes of."""
    return InvalidRequest(
        f"config.json: {key} must be a number {wording}, found {reprlib.repr(value)}", param=key
    )


def length(raw: Mapping[str, Any], key: str, default: int) -> int:
    """A number of positions, which may be written as 4096.0."""
    found = number(raw, key, default)
    if found != default and found < 1:
        raise wrong_number(key, found, "of at least 1")
    return int(found)
