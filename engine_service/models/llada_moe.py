"""LLaDA-MoE: a decoder with experts and no causal mask (Zhu et al. 2025, arXiv 2509.24389). It does
not know how masks are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_service.core.step import FULL
from engine_service.layers.experts import Mixture
from engine_service.layers.routing import SoftmaxRouter
from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions
from engine_service.models.hf_config import (
    decoder_traits,
    expert_counts,
    full_windows,
    logits_shift,
    mask_token_id,
    positive,
    refuse_unknown,
)
from engine_service.models.hf_values import listed
from tidemill.runtime.errors import InvalidRequest

_MASK_TOKEN = {"<|mdm_mask|>": 156895}
"""The published mask token under the name that is looked up last, for checkpoints without one."""

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "clip_qkv": (None,),
    "moe_router_enable_expert_bias": (None, False),
    "moe_router_score_function": (None, "softmax"),
    "norm_topk_prob": (None, False),
    "routed_scaling_factor": (None, 1),
    "shared_expert_intermediate_size": (None,),
}
"""Keys of the published class that change the arithmetic or the tensors, with what is built here:
what the released checkpoints say."""


@register_model("LLaDAMoEModelLM")
class LLaDAMoE(Decoder):
    """LLaDA-MoE-7B-A1B: OLMoE's router and names, and norms of every head instead of all heads."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        refuse_unknown(hf_config, neutral_values=_IMPLEMENTED)
        full = _as_decoder(hf_config)
        return decoder_traits(
            full,
            windows=full_windows(full),
            implements=("num_experts", "num_local_experts", "partial_rotary_factor"),
            mask_block=FULL,
            mask_token_id=mask_token_id(full, {**_MASK_TOKEN, **added_tokens}),
            logits_shift=logits_shift(full, 0),
            default_method="full_canvas",
            methods=("full_canvas",),
        )

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        full = _as_decoder(hf_config)
        bias = bool(full.get("attention_bias", False))
        num_experts, per_token = expert_counts(full)
        mixture = Mixture(
            router=SoftmaxRouter(num_experts=num_experts, per_token=per_token, renormalised=False),
            inner_size=positive(full, "expert_intermediate_size"),
        )
        return DecoderOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=bool(full.get("qk_layernorm", False)),
            mixtures=dict.fromkeys(_sparse_layers(full), mixture),
        )


def _as_decoder(hf_config: HFConfig) -> dict[str, Any]:
    """config.json under the keys that every other decoder uses."""
    full: dict[str, Any] = {"rms_norm_eps": 1e-5, **hf_config}
    full["architectures"] = hf_config.get("architectures") or ["LLaDAMoEModelLM"]
    if "dense_intermediate_size" in hf_config:
        full["intermediate_size"] = hf_config["dense_intermediate_size"]
    return full


def _sparse_layers(hf_config: HFConfig) -> list[int]:
    """`moe_layer_freq` says 0 for a dense layer, one entry a layer."""
    num_layers = positive(hf_config, "num_hidden_layers")
    sparse = listed(hf_config, "moe_layer_freq") or [1] * num_layers
    if len(sparse) != num_layers:
        raise InvalidRequest(
            f"config.json: moe_layer_freq has {len(sparse)} entries for {num_layers} layers; give "
            "one for each",
            param="moe_layer_freq",
        )
    return [layer for layer, wanted in enumerate(sparse) if wanted]
