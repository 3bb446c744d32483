"""LLaDA2: the decoder of Ling 2.0, mostly experts, trained to fill blocks of masked tokens
(Bie et al. 2025, arXiv 2512.15745). It does not know how masks are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_service.layers.experts import Mixture
from engine_service.layers.routing import BlockSigmoidRouter, GroupedSigmoidRouter, Router
from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions, TensorNames
from engine_service.models.hf_config import (
    decoder_traits,
    expert_counts,
    full_windows,
    mask_token_id,
    positive,
    refuse_unknown,
)
from tidemill.runtime.errors import InvalidRequest

_DEFAULTS: dict[str, Any] = {
    "eos_token_id": 156892,
    "first_k_dense_replace": 0,
    "n_group": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
"""What a config.json without these keys means for this architecture."""

_BLOCK = 32
_MASK_TOKEN = {"<|mdm_mask|>": 156895}
"""The published mask token under the name that is looked up last, for checkpoints without one."""

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "norm_head": (None, False),
    "norm_softmax": (None, False),
    "num_nextn_predict_layers": (None, 0),
    "router_dtype": (None, "fp32", "float32"),
    "score_function": (None, "sigmoid"),
    "use_rmsnorm": (None, True),
    "use_sliding_window": (None, False),
}
"""Keys of the published class that change the arithmetic, with what is built here."""

_NAMES = TensorNames(
    embedding="model.word_embeddings",
    attention="attention",
    qkv=("query_key_value",),
    output="dense",
    query_norm="query_layernorm",
    key_norm="key_layernorm",
)


@register_model("LLaDA2MoeModelLM")
class LLaDA2Moe(Decoder):
    """LLaDA2.0 to 2.2. Blocks of 32 positions unless config.json says otherwise, aligned at 0."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        refuse_unknown(hf_config, neutral_values=_IMPLEMENTED)
        full = {**_DEFAULTS, **hf_config}
        full["architectures"] = hf_config.get("architectures") or ["LLaDA2MoeModelLM"]
        full["block_size"] = _block(full)
        return decoder_traits(
            full,
            windows=full_windows(full),
            implements=("num_experts", "num_local_experts", "partial_rotary_factor"),
            mask_block=positive(full, "block_size"),
            mask_token_id=mask_token_id(full, {**_MASK_TOKEN, **added_tokens}),
            logits_shift=0,
            default_method="block_diffusion",
            methods=("block_diffusion",),
            routes_by_block=full.get("expert_capacity") not in (None, full.get("num_experts")),
        )

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        full = {**_DEFAULTS, **hf_config}
        sparse = range(full["first_k_dense_replace"], positive(full, "num_hidden_layers"))
        return DecoderOptions(
            qkv_bias=bool(full.get("use_qkv_bias", False)),
            output_bias=bool(full.get("use_bias", False)),
            qk_norm=bool(full.get("use_qk_norm", True)),
            mixtures=dict.fromkeys(sparse, _mixture(full)),
            names=_NAMES,
        )


def _block(hf_config: HFConfig) -> int:
    named = {"block_size": hf_config.get("block_length") or hf_config.get("block_size") or _BLOCK}
    return positive(named, "block_size")


def _mixture(hf_config: HFConfig) -> Mixture:
    """Version 2.2 chooses the experts of a whole block first (`expert_capacity`)."""
    inner = positive(hf_config, "moe_intermediate_size")
    shared = inner * (hf_config["num_shared_experts"] or 0)
    # The number and the width of the shared experts are one fact in two keys.
    given = {"moe_shared_expert_intermediate_size": (None, shared)}
    refuse_unknown(hf_config, neutral_values=given)
    chosen = _by_token if hf_config.get("expert_capacity") is None else _by_block
    return Mixture(router=chosen(hf_config), inner_size=inner, shared_size=shared)


def _by_block(hf_config: HFConfig) -> Router:
    """Raises InvalidRequest for a capacity that a token's experts do not fit in."""
    num_experts, per_token = expert_counts(hf_config)
    capacity = positive(hf_config, "expert_capacity")
    if not per_token <= capacity <= num_experts:
        raise InvalidRequest(
            f"config.json: expert_capacity {capacity} must be at least num_experts_per_tok "
            f"{per_token} and at most num_experts {num_experts}",
            param="expert_capacity",
        )
    return BlockSigmoidRouter(
        num_experts=num_experts,
        per_token=per_token,
        biased=bool(hf_config.get("moe_router_enable_expert_bias", True)),
        block=_block(hf_config),
        capacity=capacity,
        renormalised=bool(hf_config.get("norm_topk_prob", True)),
        scale=float(hf_config["routed_scaling_factor"]),
    )


def _by_token(hf_config: HFConfig) -> Router:
    """Raises InvalidRequest for groups that do not divide the experts or hold too few."""
    num_experts, per_token = expert_counts(hf_config)
    num_groups, kept = positive(hf_config, "n_group"), positive(hf_config, "topk_group")
    size, rest = divmod(num_experts, num_groups)
    if rest or size < 2 or not per_token <= kept * size <= num_experts:
        raise InvalidRequest(
            f"config.json: n_group {num_groups} of {num_experts} experts, topk_group {kept} and "
            f"num_experts_per_tok {per_token} do not go together: groups must be equal, of two "
            "experts or more, and those that are kept must hold as many as a token takes",
            param="n_group",
        )
    return GroupedSigmoidRouter(
        num_experts=num_experts,
        per_token=per_token,
        biased=bool(hf_config.get("moe_router_enable_expert_bias", True)),
        num_groups=num_groups,
        kept_groups=kept,
        renormalised=bool(hf_config.get("norm_topk_prob", True)),
        scale=float(hf_config["routed_scaling_factor"]),
    )
