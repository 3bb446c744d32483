"""Ling 2.0 and Ring 2.0: mostly experts behind half-turned heads ("Every Activation Boosted", Ling
Team 2025, arXiv 2510.22115). LLaDA2 (llada2_moe.py) is this decoder with another mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_service.layers.experts import Mixture
from engine_service.layers.routing import GroupedSigmoidRouter, Router
from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions, TensorNames
from engine_service.models.hf_config import (
    count,
    decoder_traits,
    expert_counts,
    full_windows,
    positive,
    positive_or,
    refuse_unknown,
    with_defaults,
)
from engine_service.models.hf_values import factor
from tidemill.runtime.errors import InvalidRequest

_DEFAULTS: dict[str, Any] = {
    "eos_token_id": 156892,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000.0,
    "routed_scaling_factor": 1.0,
    "topk_group": 4,
}
"""What a config.json without these keys means for this architecture. Heads then turn whole."""

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "norm_head": (None, False),
    "norm_softmax": (None, False),
    "num_nextn_predict_layers": (None, 0),
    "router_dtype": (None, "fp32", "float32"),
    "score_function": (None, "sigmoid"),
    "use_rmsnorm": (None, True),
    "use_sliding_window": (None, False),
}
"""Keys of the published classes that change the arithmetic, with what is built here."""

_OF_BLOCKS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("block_length", "block_size", "expert_capacity"), (None,)
)
"""Keys of LLaDA2: a checkpoint with one of them is no autoregressive one, whatever its name."""

_NAMES = TensorNames(
    embedding="model.word_embeddings",
    attention="attention",
    qkv=("query_key_value",),
    output="dense",
    query_norm="query_layernorm",
    key_norm="key_layernorm",
)


@register_model("BailingMoeV2ForCausalLM")
class BailingMoeV2(Decoder):
    """Ling-mini, Ling-flash and Ring of version 2.0, without layers that predict further tokens."""

    defaults: ClassVar[HFConfig] = _DEFAULTS

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        refuse_unknown(hf_config, neutral_values=_OF_BLOCKS)
        return ling_traits(with_defaults(cls.defaults, hf_config))

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        full = {**cls.defaults, **hf_config}
        inner = positive(full, "moe_intermediate_size")
        shared = inner * _count_shared(full)
        # The number and the width of the shared experts are one fact in two keys.
        given = {"moe_shared_expert_intermediate_size": (None, shared)}
        refuse_unknown(full, neutral_values=given)
        mixture = Mixture(router=cls.router(full), inner_size=inner, shared_size=shared)
        sparse = range(count(full, "first_k_dense_replace"), positive(full, "num_hidden_layers"))
        return DecoderOptions(
            qkv_bias=bool(full.get("use_qkv_bias", False)),
            output_bias=bool(full.get("use_bias", False)),
            qk_norm=bool(full.get("use_qk_norm", True)),
            mixtures=dict.fromkeys(sparse, mixture),
            names=_NAMES,
        )

    @classmethod
    def router(cls, hf_config: HFConfig) -> Router:
        """Of a config.json with its defaults.

        Raises InvalidRequest for groups that do not divide the experts or hold too few.
        """
        num_experts, per_token = expert_counts(hf_config)
        num_groups, kept = positive(hf_config, "n_group"), positive(hf_config, "topk_group")
        size, rest = divmod(num_experts, num_groups)
        if rest or size < 2 or not per_token <= kept * size <= num_experts:
            raise InvalidRequest(
                f"config.json: n_group {num_groups} of {num_experts} experts, topk_group {kept} "
                f"and num_experts_per_tok {per_token} do not go together: groups must be equal, "
                "of two experts or more, and those that are kept must hold as many as a token "
                "takes",
                param="n_group",
            )
        return GroupedSigmoidRouter(
            **expert_shares(hf_config), num_groups=num_groups, kept_groups=kept
        )


def ling_traits(hf_config: HFConfig, **overrides: Any) -> ModelTraits:
    """`decoder_traits` of a config.json with its defaults.

    Raises Unsupported for what the published classes know and this decoder does not do.
    """
    refuse_unknown(hf_config, neutral_values=_IMPLEMENTED)
    full, turned = dict(hf_config), hf_config.get("rotary_dim")
    if turned is not None and full.get("partial_rotary_factor") is None:
        of_all = positive(full, "hidden_size") // positive(full, "num_attention_heads")
        head_dim = positive_or(full, "head_dim", of_all)
        full["partial_rotary_factor"] = positive(full, "rotary_dim") / max(1, head_dim)
    traits = decoder_traits(
        full,
        windows=full_windows(full),
        implements=("num_experts", "num_local_experts", "partial_rotary_factor"),
        **overrides,
    )
    assert traits.rope is not None, "decoder_traits reads rotary positions"
    # How much of a head turns is one fact in two keys, and servers differ in which one they read.
    refuse_unknown(full, neutral_values={"rotary_dim": (None, traits.rope.rotary_dim)})
    return traits


def _count_shared(hf_config: HFConfig) -> int:
    """Experts that all tokens take; null means none."""
    key = "num_shared_experts"
    return 0 if hf_config[key] is None else count(hf_config, key)


def expert_shares(hf_config: HFConfig) -> dict[str, Any]:
    """What the routers of this family have in common."""
    num_experts, per_token = expert_counts(hf_config)
    return {
        "num_experts": num_experts,
        "per_token": per_token,
        "biased": bool(hf_config.get("moe_router_enable_expert_bias", True)),
        "renormalised": bool(hf_config.get("norm_topk_prob", True)),
        "scale": factor(hf_config, "routed_scaling_factor"),
    }
