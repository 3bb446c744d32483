"""What applies to requests that say nothing: the checkpoint's sampling, the operator's knobs."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from engine_service.config import EngineConfig
from engine_service.core.checks import check_number, check_whole
from engine_service.core.params import SamplingParams, given
from engine_service.core.strategy import DecodeStrategy
from tidemill.runtime.errors import InvalidRequest

_SAMPLING_NAMES = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
}
_LEAST = {"top_k": -1, "max_new_tokens": 1}
"""Of whole numbers; 0 and -1 are no top_k at all."""
_OF_DRAWING = frozenset({"temperature", "top_p", "top_k", "min_p"})
"""Read only where tokens are drawn."""


def sampling_defaults(config: EngineConfig, generation_config: Mapping[str, Any]) -> SamplingParams:
    """What the checkpoint's file says, unless the operator wants none of it. Raises as
    `read_sampling`."""
    return read_sampling(generation_config if config.generation_config == "auto" else {})


def read_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling defaults of the checkpoint; max_new_tokens bounds requests that set no limit.

    Raises InvalidRequest for what is no number, or is out of a request's range: every request that
    says nothing would be refused by a parameter that it never sent. With `do_sample` false nobody
    draws by such a file, and it may say what is in no range of how to: that is left out.
    """
    is_greedy, found = generation_config.get("do_sample") is False, dict[str, Any]()
    for name, kind in _SAMPLING_NAMES.items():
        if (value := generation_config.get(name)) is None:
            continue
        number = _number(name, value)
        try:
            found[name] = _in_range(name, kind, number)
        except InvalidRequest as refused:
            if not (is_greedy and name in _OF_DRAWING):
                raise _fault(refused.message.rstrip("."), name) from refused
    return SamplingParams(max_tokens=found.pop("max_new_tokens", None), **found)


def _in_range(name: str, kind: type[int] | type[float], value: float) -> float:
    """The value as one of its kind, by the rules of core/admission. Raises InvalidRequest."""
    if kind is int:
        whole = int(value) if value == int(value) else value
        check_whole(name, whole, low=_LEAST[name])
        return whole
    check_number(name, value)
    return float(value)


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise _fault(f"{name} is {reprlib.repr(value)}, which is no finite number", name)
    return value


def _fault(what: str, name: str) -> InvalidRequest:
    return InvalidRequest(
        f"generation_config.json: {what}; correct it, or pass --generation-config none", param=name
    )


def read_knobs(config: EngineConfig, strategy: DecodeStrategy | None) -> dict[str, Any]:
    """All knobs of the default method; encoders have none. Raises InvalidRequest."""
    if strategy is not None:
        return asdict(strategy.parse(given(config.default_params)))
    if config.default_params:
        raise InvalidRequest(
            "default_params are of decoding methods, and this model is an encoder; leave them out",
            param="default_params",
        )
    return {}
