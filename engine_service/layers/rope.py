"""Rotary angles: the published scalings, read from config.json, and the tables of one step.

The formulas are those the checkpoints were trained and published with; float32 as in transformers,
because a last-bit difference in a frequency grows with the position. It knows no attention.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine_service.kernels.rotary import rotary_angles
from engine_service.layers.rope_numbers import MOST, length, number, wrong_number
from tidemill.runtime.errors import InvalidRequest, Unsupported

_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_REQUIRED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(),
}
_PARTIAL = "partial_rotary_factor"
_COMMON = frozenset(
    {"rope_type", "type", "rope_theta", "original_max_position_embeddings", _PARTIAL}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """A rotary embedding of heads. Fields that a kind does not use keep defaults."""

    kind: str
    """default, linear, llama3 or yarn."""
    rotary_dim: int
    """Leading features of a head that turn, an even number; the others stay as they are."""
    theta: float
    factor: float = 1.0
    original_max_len: int = 0
    """Context length before the scaling (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin."""


def read_rope(
    hf_config: Mapping[str, Any], head_dim: int, *, partial: bool = False
) -> RopeParameters:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

    `partial`: the architecture may turn a part of every head (`partial_rotary_factor`). Raises
    Unsupported for a kind or key that is not implemented and InvalidRequest for a missing one or an
    impossible value, naming it.
    """
    raw = _one_for_all_layers(_parameters(hf_config))
    kind = raw.get("rope_type") or raw.get("type") or "default"
    share = _said(_PARTIAL, raw, hf_config, 1.0)
    if share != 1.0 and not partial:
        raise Unsupported(
            f"rotary parameter {_PARTIAL} = {reprlib.repr(share)} is not supported for this "
            "architecture",
            param=_PARTIAL,
        )
    _check_keys(kind, raw)
    max_len = length(hf_config, "max_position_embeddings", 0)
    before = "original_max_position_embeddings"
    original = length(hf_config, before, 0) or length(raw, before, max_len)
    if kind in ("llama3", "yarn") and not original:
        raise InvalidRequest(
            f"config.json: rope_type {kind!r} needs {before}, the context's length before the "
            "scaling, or max_position_embeddings",
            param=before,
        )
    factor = number(raw, "factor", max_len / original if kind == "yarn" else 1.0)
    theta = {"rope_theta": _said("rope_theta", raw, hf_config, None)}
    return RopeParameters(
        kind=kind,
        rotary_dim=_rotary_dim(head_dim, share),
        theta=number(theta, "rope_theta", 10000.0, above=1),
        factor=factor,
        original_max_len=original,
        low_freq_factor=number(raw, "low_freq_factor", 1.0),
        high_freq_factor=number(raw, "high_freq_factor", 1.0),
        beta_fast=number(raw, "beta_fast", 32.0),
        beta_slow=number(raw, "beta_slow", 1.0),
        truncate=bool(raw.get("truncate", True)),
        attention_factor=_attention_factor(raw, factor) if kind == "yarn" else 1.0,
    )


def _parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of either spelling."""
    key = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    said = hf_config.get(key) or {}
    if not isinstance(said, Mapping):
        raise InvalidRequest(
            f'config.json: {key} must be an object such as {{"rope_type": "yarn", "factor": 4.0}}, '
            f"found {said!r}",
            param=key,
        )
    return dict(said)


def _said(key: str, raw: Mapping[str, Any], hf_config: Mapping[str, Any], default: Any) -> Any:
    """What config.json says under a key that transformers 5 moved into rope_parameters, over which
    rope_scaling may be said without it. Raises InvalidRequest for two values: one of them, maybe an
    operator's, would be ignored."""
    newer = hf_config.get("rope_parameters")
    parts = (raw, newer if isinstance(newer, Mapping) else {})
    inner = next((part[key] for part in parts if part.get(key) is not None), None)
    outer = hf_config.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise InvalidRequest(
            f"config.json: {key} {outer!r} and, among the rotary parameters, {inner!r} are two; "
            f"leave one of them out, for example with --hf-overrides '{{\"{key}\": null}}'",
            param=key,
        )
    return next((one for one in (inner, outer) if one is not None), default)


def scaled_max_len(rope: RopeParameters, max_position_embeddings: int) -> int:
    """Longest context the scaling was made for.

    Checkpoints disagree on whether max_position_embeddings is the length before (linear, and yarn
    with a factor) or after the scaling; for yarn the original length tells.
    """
    if rope.kind == "linear":
        return int(max_position_embeddings * rope.factor)
    if rope.kind == "yarn":
        return max(max_position_embeddings, int(rope.original_max_len * rope.factor))
    return max_position_embeddings


def inverse_frequencies(rope: RopeParameters) -> torch.Tensor:
    """[rotary_dim / 2] float32 on the CPU."""
    dim = rope.rotary_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    plain = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(rope.theta**exponent, rope)
    return plain


class RotaryTable:
    """cos and sin of a step's positions; one object per model, all layers share its result."""

    def __init__(self, rope: RopeParameters, *, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope).to(device)
        self._factor = rope.attention_factor

    def __call__(
        self, positions_T: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([T, 1, D] cos, [T, 1, D] sin with its first half negated) of the D = rotary_dim features
        that turn, for kernels/rotary.py."""
        return rotary_angles(positions_T, self._frequencies, self._factor, dtype)


def _one_for_all_layers(raw: dict[str, Any]) -> dict[str, Any]:
    """Accepts parameters nested by layer type as long as all types share them."""
    nested = [value for value in raw.values() if isinstance(value, Mapping)]
    if not nested:
        return raw
    if len(nested) != len(raw) or any(value != nested[0] for value in nested):
        raise Unsupported(
            "rotary parameters that differ between layer types are not supported: "
            f"{', '.join(raw)}",
            param="rope_parameters",
        )
    return dict(nested[0])


def _rotary_dim(head_dim: int, share: float) -> int:
    if not isinstance(share, int | float) or isinstance(share, bool) or not abs(share) <= MOST:
        raise wrong_number(_PARTIAL, share, "above 0 and at most 1")
    dim = int(head_dim * share)
    if dim == head_dim and (head_dim < 1 or head_dim % 2):
        raise Unsupported(
            f"config.json: heads of {head_dim} features (head_dim, or hidden_size by "
            "num_attention_heads) do not turn in pairs; an even number is supported",
            param="head_dim",
        )
    if not 0 < dim <= head_dim or dim % 2:
        raise Unsupported(
            f"config.json: {_PARTIAL} {share!r} turns {dim} of {head_dim} features of a head; an "
            f"even number from 2 to {head_dim} is supported",
            param=_PARTIAL,
        )
    return dim


def _check_keys(kind: str, raw: Mapping[str, Any]) -> None:
    if not isinstance(kind, str) or kind not in _KEYS:
        raise Unsupported(
            f"rope_type {kind!r} is not supported; supported: {', '.join(_KEYS)}",
            param="rope_type",
        )
    given = {key: value for key, value in raw.items() if value is not None}
    for key in sorted(given.keys() - _KEYS[kind] - _COMMON):
        raise Unsupported(
            f"rotary parameter {key} = {given[key]!r} is not supported for rope_type {kind!r}",
            param=key,
        )
    for key in sorted(_REQUIRED[kind] - given.keys()):
        raise InvalidRequest(
            f"config.json: rope_type {kind!r} needs {key} in rope_parameters", param=key
        )


def _llama3(plain: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by factor, short ones kept, between them a blend, of
    which equal bounds leave nothing: they are a step, to other servers too."""
    low_wave = rope.original_max_len / rope.low_freq_factor
    high_wave = rope.original_max_len / rope.high_freq_factor
    wave = 2 * math.pi / plain
    stretched = torch.where(wave > low_wave, plain / rope.factor, plain)
    if rope.high_freq_factor == rope.low_freq_factor:
        return stretched  # a blend would be 0 / 0 of a wave that lies on the bound
    share = (rope.original_max_len / wave - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = (1 - share) * stretched / rope.factor + share * stretched
    between = ~(wave < high_wave) & ~(wave > low_wave)
    return torch.where(between, blend, stretched)


def _yarn(powers: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), equations 22 and 23: fast waves are kept, slow
    ones interpolated, a linear ramp between the dimensions of beta_fast and beta_slow turns."""
    dim, base = rope.rotary_dim, rope.theta

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step instead of a division by zero
    ramp = torch.arange(dim // 2, dtype=torch.float32, device=powers.device)
    kept = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _attention_factor(raw: Mapping[str, Any], factor: float) -> float:
    """The temperature of YaRN's section 3.4, as a factor on cos and sin."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if raw.get("attention_factor") is not None:
        return number(raw, "attention_factor", 1.0)
    if raw.get("mscale") and raw.get("mscale_all_dim"):
        return mscale(number(raw, "mscale", 1.0)) / mscale(number(raw, "mscale_all_dim", 1.0))
    return mscale(1.0)
