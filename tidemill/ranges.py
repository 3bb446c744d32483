"""Which numbers a field of a config may have. It does not know any field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from tidemill.runtime.errors import InvalidRequest

MOST_BYTES = (1 << 31) - 1
"""gRPC counts bytes of a message in 32 bits with a sign."""


class Range(NamedTuple):
    """From `least` to `most`, or above `least` where `is_open`; the words say what these are."""

    least: float
    why: str
    most: float = math.inf
    why_most: str = ""
    is_open: bool = False


COUNT = Range(0, "a count")
PORT = Range(0, "a free port", (1 << 16) - 1, "the last port")
TIME = Range(0, "a time", 1e9, "thirty years")
"""Seconds: times in nanoseconds and milliseconds are made of them, which have an end."""
SOME_TIME = TIME._replace(why="no time", is_open=True)
MESSAGE_BYTES = Range(1, "one byte", MOST_BYTES, "what gRPC can count")


def check_ranges(config: object, ranges: Mapping[str, Range]) -> None:
    """Raises InvalidRequest naming field, value, limit and what to pass instead; for what is no
    number too. A value of None is chosen later."""
    for name, allowed in ranges.items():
        if (value := getattr(config, name)) is None:
            continue
        require_at_least(name, value, allowed.least, allowed.why, is_open=allowed.is_open)
        if value > allowed.most:
            most = f"{allowed.most:.10g}"
            raise InvalidRequest(
                f"{name} {value} is more than {most} ({allowed.why_most}); pass {most} or less",
                param=name,
            )


def require_at_least(
    name: str, value: float, least: float, because: str, *, is_open: bool = False
) -> None:
    """Raises InvalidRequest for less, where it `is_open` for the least one too, and for what is no
    number."""
    if is_open and not value > least:
        raise InvalidRequest(
            f"{name} {value} is not more than {least:g} ({because}); pass more than {least:g}",
            param=name,
        )
    if not value >= least:
        raise InvalidRequest(
            f"{name} {value} is less than {least:g} ({because}); pass {least:g} or more", param=name
        )
