"""Which numbers the flags of a benchmark may have, said in their types. It knows no benchmark."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple, get_args, get_type_hints

from tidemill.runtime.errors import InvalidRequest


class Bounds(NamedTuple):
    """Of a number; `above` is not one of them."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf


OneOrMore = Annotated[int, Bounds(least=1)]
Whole = Annotated[int, Bounds(least=0)]
ZeroOrMore = Annotated[float, Bounds(least=0)]
AboveZero = Annotated[float, Bounds(above=0)]
Part = Annotated[float, Bounds(above=0, most=1)]
Share = Annotated[float, Bounds(least=0, most=1)]


def check_bounds(options: object) -> None:
    """Raises InvalidRequest naming a field of the dataclass that does not lie in its bounds; None
    does."""
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        for one in (hint, *get_args(hint)):
            for bounds in getattr(one, "__metadata__", ()):
                if isinstance(bounds, Bounds) and (value := getattr(options, name)) is not None:
                    _check(name, value, bounds)


def _check(name: str, value: float, bounds: Bounds) -> None:
    wrong = ""
    if not math.isfinite(value):
        wrong = "it has to be a finite number"
    elif value < bounds.least:
        wrong = f"at least {bounds.least:g} works"
    elif value > bounds.most:
        wrong = f"at most {bounds.most:g} works"
    elif value <= bounds.above:
        wrong = f"it has to be above {bounds.above:g}"
    if wrong:
        raise InvalidRequest(f"{name} is {value}; {wrong}", param=name)
