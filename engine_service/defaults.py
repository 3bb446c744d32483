"""What applies to requests that say nothing: the checkpoint's sampling, the operator's knobs."""

from __future__ import annotations

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
}


def read_sampling(generation_config: dict[str, Any]) -> SamplingParams:
    """Sampling defaults of the checkpoint; max_new_tokens bounds requests that set no limit."""
    given = {
        name: kind(generation_config[name])
        for name, kind in _SAMPLING_NAMES.items()
        if generation_config.get(name) is not None
    }
    return SamplingParams(**given, max_tokens=generation_config.get("max_new_tokens"))


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
