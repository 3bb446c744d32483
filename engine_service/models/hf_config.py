"""Reads the fields that decoder configurations of transformers share, and refuses the rest.

A checkpoint that names a trait nobody implements fails at load, never at the first request.
It does not know any single architecture.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

from engine_service.layers.rope import read_rope, scaled_max_len
from engine_service.models.base import HFConfig, ModelTraits
from engine_service.models.detection import BLOCK_KEYS, MASK_KEYS
from engine_service.models.hf_values import listed
from tidemill.runtime.errors import InvalidRequest, Unsupported

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
    "hidden_act": (None, "silu", "swish"),
    "is_causal": (None, True),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "quantization_config": (None, {}),
    "residual_multiplier": (None, 1),
    "use_bidirectional_attention": (None, False),
    "use_dual_chunk_attention": (None, False),
}
"""Keys that change the arithmetic, with the values that leave it as it is."""

_MASK_TOKENS = ("<|MASK|>", "<|mask|>", "<|mdm_mask|>")
_EOT_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|role_end|>")
_EXPERT_COUNTS = ("num_local_experts", "num_experts")
"""Two spellings of one number. Defaults are written in the second."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_DTYPES = ("float32", "bfloat16", "float16")


def decoder_traits(
    hf_config: HFConfig,
    *,
    windows: tuple[int | None, ...],
    implements: Collection[str] = (),
    **overrides: Any,
) -> ModelTraits:
    """Traits of a plain decoder; `overrides` are the fields the architecture decides itself, and
    `implements` names keys of config.json that others refuse and it reads.

    Raises InvalidRequest for a missing or impossible field, Unsupported for an unknown trait.
    """
    sees_behind = ("is_causal",) if overrides.get("mask_block", 1) > 1 else ()
    refuse_unknown(hf_config, (*implements, *sees_behind))
    _check_layer_types(hf_config, windows)
    num_heads = positive(hf_config, "num_attention_heads")
    num_kv_heads = positive_or(hf_config, "num_key_value_heads", num_heads)
    hidden_size = positive(hf_config, "hidden_size")
    if num_heads % num_kv_heads:
        raise InvalidRequest(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}",
            param="num_key_value_heads",
        )
    head_dim = positive_or(hf_config, "head_dim", hidden_size // num_heads)
    max_len = positive(hf_config, "max_position_embeddings")
    rope = read_rope(hf_config, head_dim, partial="partial_rotary_factor" in implements)
    return ModelTraits(
        architecture=hf_config["architectures"][0],
        hidden_size=hidden_size,
        num_layers=positive(hf_config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(hf_config, "intermediate_size"),
        vocab_size=positive(hf_config, "vocab_size"),
        norm_eps=norm_eps(hf_config, "rms_norm_eps", 1e-6),
        rope=rope,
        windows=windows,
        max_model_len=scaled_max_len(rope, max_len),
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        dtype=read_dtype(hf_config),
        eos_token_ids=token_ids(hf_config.get("eos_token_id")),
        **overrides,
    )


def with_defaults(defaults: HFConfig, hf_config: HFConfig) -> dict[str, Any]:
    """config.json over what an architecture means without its keys. What stands in rope_parameters,
    where transformers 5 writes rope_theta and partial_rotary_factor, is not missing."""
    moved = hf_config.get("rope_parameters")
    parts = (moved, *moved.values()) if isinstance(moved, Mapping) else ()
    said = {
        key
        for part in parts
        if isinstance(part, Mapping)
        for key, value in part.items()
        if value is not None
    }
    return {**{key: value for key, value in defaults.items() if key not in said}, **hf_config}


def positive(hf_config: HFConfig, key: str) -> int:
    """A size that config.json must give; raises InvalidRequest naming it."""
    value = hf_config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidRequest(
            f"config.json: {key} must be a positive integer, found {value!r}", param=key
        )
    return value


def count(hf_config: HFConfig, key: str) -> int:
    """How many of something there may be none of; raises InvalidRequest naming it."""
    value = hf_config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(
            f"config.json: {key} must be a whole number from 0 on, found {value!r}", param=key
        )
    return value


def positive_or(hf_config: HFConfig, key: str, default: int) -> int:
    """A size that config.json may leave out, or say as null or 0."""
    return positive(hf_config, key) if hf_config.get(key) else default


def norm_eps(hf_config: HFConfig, key: str, default: float) -> float:
    """What is added to a mean of squares; raises InvalidRequest for what is no number or below 0,
    of which the root is NaN."""
    value = hf_config.get(key, default)
    if not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise InvalidRequest(
            f"config.json: {key} must be a number from 0 on, found {reprlib.repr(value)}", param=key
        )
    return float(value)


def window_of(hf_config: HFConfig) -> int | None:
    """`sliding_window`; null means full attention. Raises InvalidRequest for what is no size."""
    key = "sliding_window"
    return None if hf_config.get(key) is None else positive(hf_config, key)


def expert_counts(hf_config: HFConfig) -> tuple[int, int]:
    """(experts of a layer, experts of a token); raises InvalidRequest where they cannot be."""
    given = (key for key in _EXPERT_COUNTS if hf_config.get(key) is not None)
    num_experts = positive(hf_config, next(given, _EXPERT_COUNTS[-1]))
    per_token = positive(hf_config, "num_experts_per_tok")
    if per_token > num_experts:
        raise InvalidRequest(
            f"config.json: num_experts_per_tok {per_token} exceeds the {num_experts} experts",
            param="num_experts_per_tok",
        )
    return num_experts, per_token


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` comes as nothing, one id, or a list; raises InvalidRequest for what is no id:
    a sequence would never end there."""
    if value is None:
        return ()
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    for one in found:
        if not isinstance(one, int) or isinstance(one, bool):
            raise InvalidRequest(
                f"eos_token_id must be a token id or a list of them, found {value!r}",
                param="eos_token_id",
            )
    return found


def mask_token_id(hf_config: HFConfig, added_tokens: Mapping[str, int]) -> int:
    """config.json first, then the tokenizer's added tokens; raises InvalidRequest without one."""
    said = [hf_config[key] for key in MASK_KEYS if hf_config.get(key) is not None]
    said += [added_tokens[name] for name in _MASK_TOKENS if name in added_tokens]
    found = said[0] if said else None
    vocab_size = positive(hf_config, "vocab_size")
    if not isinstance(found, int) or not 0 <= found < vocab_size:
        raise InvalidRequest(
            f"the mask token of this diffusion model is {found!r}, which is not an id below "
            f"the vocabulary size {vocab_size}: say which, "
            "--hf-overrides '{\"mask_token_id\": N}', or add one of "
            f"{', '.join(_MASK_TOKENS)} to the tokenizer's added tokens",
            param="mask_token_id",
        )
    return found


def block_length(hf_config: HFConfig, default: int) -> int:
    """Positions of a block, under either name; raises InvalidRequest for two that differ."""
    said = {key: hf_config[key] for key in BLOCK_KEYS if hf_config.get(key) is not None}
    if len(set(map(str, said.values()))) > 1:
        told = " and ".join(f"{key} {value!r}" for key, value in said.items())
        raise InvalidRequest(
            f"config.json: {told} are two lengths of a block; leave one of them out, for example "
            "with --hf-overrides '{\"bd_size\": null}'",
            param="block_size",
        )
    key = next(iter(said), "block_size")
    return positive({key: said.get(key, default)}, key)


def logits_shift(hf_config: HFConfig, default: int) -> int:
    """How far behind a position the query is that its token is decided from: the architecture's
    own, unless `uses_shifted_prediction` says otherwise."""
    said = hf_config.get("uses_shifted_prediction")
    return default if said is None else int(bool(said))


def eot_token_ids(added_tokens: Mapping[str, int], vocab_size: int) -> tuple[int, ...]:
    """What ends a turn, by the names that it has among a tokenizer's added tokens."""
    found = (added_tokens[name] for name in _EOT_TOKENS if name in added_tokens)
    return tuple(one for one in found if 0 <= one < vocab_size)


def full_windows(hf_config: HFConfig) -> tuple[int | None, ...]:
    """No sliding window on any layer."""
    return (None,) * positive(hf_config, "num_hidden_layers")


def qwen_windows(hf_config: HFConfig) -> tuple[int | None, ...]:
    """Qwen's rule: `layer_types`, or all layers from `max_window_layers` on; off by default."""
    num_layers = positive(hf_config, "num_hidden_layers")
    window = window_of(hf_config) if hf_config.get("use_sliding_window", False) else None
    if window is None:
        return full_windows(hf_config)
    types = listed(hf_config, "layer_types")
    if not types:
        first = count({"max_window_layers": 28, **hf_config}, "max_window_layers")
        types = [_LAYER_TYPES[layer >= first] for layer in range(num_layers)]
    unknown = sorted({str(kind) for kind in types if kind not in _LAYER_TYPES})
    if unknown or len(types) != num_layers:
        raise Unsupported(
            f"config.json: layer_types must name one of {', '.join(_LAYER_TYPES)} for each of the "
            f"{num_layers} layers, found {len(types)} entries with {unknown or 'no others'}",
            param="layer_types",
        )
    return tuple(window if kind == _LAYER_TYPES[1] else None for kind in types)


def _check_layer_types(hf_config: HFConfig, windows: tuple[int | None, ...]) -> None:
    """Raises Unsupported where `layer_types` says of a layer what its window does not: few
    architectures read the key, and the others would compute another attention than is told."""
    types = listed(hf_config, "layer_types")
    for layer, (kind, window) in enumerate(zip(types, windows, strict=False)):
        own = _LAYER_TYPES[window is not None]
        if kind != own:
            raise Unsupported(
                f"config.json: layer_types names {kind!r} for layer {layer}, which is "
                f"{own!r} by all that this architecture reads (sliding_window, "
                "use_sliding_window); if that is right, pass "
                "--hf-overrides '{\"layer_types\": null}'",
                reason="TRAIT_UNSUPPORTED",
                param="layer_types",
            )


def refuse_unknown(
    hf_config: HFConfig,
    implements: Collection[str] = (),
    *,
    neutral_values: Mapping[str, tuple[Any, ...]] = _NEUTRAL,
) -> None:
    """Raises Unsupported for a trait that would change the numbers if it were ignored.

    `neutral_values` names the values of a key that mean nothing: an architecture has its own.
    """
    for key, neutral in neutral_values.items():
        value = hf_config.get(key)
        if key not in implements and value not in neutral:
            shown = value.get("quant_method", "unknown") if isinstance(value, dict) else value
            raise Unsupported(
                f"config.json: {key} = {shown!r} is not supported by this build; "
                "choose a checkpoint without it",
                reason="TRAIT_UNSUPPORTED",
                param=key,
            )


def read_dtype(hf_config: HFConfig) -> str:
    """float32, bfloat16 or float16; raises Unsupported for others."""
    name = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise Unsupported(
            f"config.json: dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}",
            param="dtype",
        )
    return name
