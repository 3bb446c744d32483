"""What applies to requests that say nothing: the checkpoint's sampling, the operator's knobs."""

from __future__ import annotations

import reprlib
import sys
from dataclasses import asdict
from typing import Any

from engine_service.config import EngineConfig
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


def read_sampling(generation_config: dict[str, Any]) -> SamplingParams:
    """Sampling defaults of the checkpoint; max_new_tokens bounds requests that set no limit.
    Raises InvalidRequest for what is no number."""
    given = {
        name: kind(_number(name, generation_config[name]))
        for name, kind in _SAMPLING_NAMES.items()
        if generation_config.get(name) is not None
    }
    return SamplingParams(max_tokens=given.pop("max_new_tokens", None), **given)


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise InvalidRequest(
            f"generation_config.json: {name} is {reprlib.repr(value)}, which is no finite number; "
            "correct it, or pass --generation-config none",
            param=name,
        )
    return value


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
