"""Checks of single values that a caller may set. It does not know models or methods."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from tidemill.runtime.errors import InvalidRequest

MIN_TEMPERATURE = 9e-6
"""Far below it the scaled logits leave the range of float32. Not 1e-5, which callers like to send:
a float32 field makes 9.9999997e-06 of it. 0 is greedy."""

MAX_TEMPERATURE = 1e30
"""Uniform long before. Above it the inverse leaves float32, and 0 times -inf is no number."""


class _Range(NamedTuple):
    low: float
    high: float
    wording: str


_RANGES = {
    "temperature": _Range(
        MIN_TEMPERATURE, MAX_TEMPERATURE, "0 (greedy) or at least 9e-6 and at most 1e30"
    ),
    "top_p": _Range(math.ulp(0.0), 1.0, "in (0, 1]"),
    "min_p": _Range(0.0, 1.0, "in [0, 1]"),
    "repetition_penalty": _Range(1e-3, 1e3, "above 0, in [0.001, 1000]"),
    "presence_penalty": _Range(-2.0, 2.0, "in [-2, 2]"),
    "frequency_penalty": _Range(-2.0, 2.0, "in [-2, 2]"),
    "logit_bias": _Range(-100.0, 100.0, "in [-100, 100]"),
}


def is_number(value: Any) -> bool:
    """A finite int or float; a bool is neither."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def check_number(name: str, value: Any) -> None:
    """Raises InvalidRequest unless `value` is None or a finite number in the range of `name`."""
    if value is None or (name == "temperature" and is_number(value) and value == 0):
        return
    low, high, wording = _RANGES[name]
    if not (is_number(value) and low <= value <= high):
        raise InvalidRequest(f"{name} is {value!r}; it must be {wording} and finite.", param=name)


def check_whole(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    """Raises InvalidRequest unless `value` is None or an int in [low, high]."""
    if value is None:
        return
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and value >= low and (high is None or value <= high):
        return
    limits = f"at least {low}" if high is None else f"in [{low}, {high}]"
    raise InvalidRequest(f"{name} is {value!r}; it must be a whole number {limits}.", param=name)


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id outside of the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
    raise InvalidRequest(
        f"{name} holds token id {wrong}; ids of this model are in [0, {vocab_size}).",
        reason="TOKEN_ID_OUT_OF_RANGE",
        param=name,
    )


def read_token_ids(name: str, packed: bytes, vocab_size: int) -> list[int]:
    """The ids of a prompt from little-endian uint32; raises InvalidRequest."""
    if not packed:
        raise InvalidRequest("The prompt is empty; it needs at least one token.", param=name)
    if len(packed) % 4:
        raise InvalidRequest(
            f"{name} has {len(packed)} bytes; it must be packed little-endian uint32, 4 bytes a "
            "token.",
            param=name,
        )
    # Twice as fast as struct on long prompts; every machine served has this byte order.
    token_ids = memoryview(packed).cast("I").tolist()
    check_token_ids(name, token_ids, vocab_size)
    return token_ids


def penalty_is_neutral(name: str, value: float | None) -> bool:
    """Whether a penalty changes nothing."""
    return value is None or value == (1.0 if name == "repetition_penalty" else 0.0)
