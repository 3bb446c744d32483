"""Qwen3 with experts: Qwen3's attention, and a softmax router in all layers or some of them."""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.layers.experts import Mixture
from engine_service.layers.routing import SoftmaxRouter
from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions
from engine_service.models.hf_config import decoder_traits, expert_counts, positive, window_of
from engine_service.models.hf_values import layers_listed

DEFAULTS = {
    "decoder_sparse_step": 1,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
"""What a config.json without these keys means for this architecture."""

EXPERT_KEYS = ("num_experts", "num_local_experts")
_DENSE = "mlp_only_layers"


@register_model("Qwen3MoeForCausalLM")
class Qwen3Moe(Decoder):
    """Yang et al. 2025, arXiv 2505.09388. A sliding window, which is off by default, is one for all
    layers."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = {**DEFAULTS, **hf_config}
        return decoder_traits(full, windows=windows(full), implements=EXPERT_KEYS)

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        full = {**DEFAULTS, **hf_config}
        bias = bool(full.get("attention_bias", False))
        num_experts, per_token = expert_counts(full)
        router = SoftmaxRouter(
            num_experts=num_experts,
            per_token=per_token,
            renormalised=bool(full.get("norm_topk_prob", False)),
        )
        mixture = Mixture(router=router, inner_size=positive(full, "moe_intermediate_size"))
        return DecoderOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            mixtures=dict.fromkeys(_sparse_layers(full), mixture),
        )


def windows(hf_config: HFConfig) -> tuple[int | None, ...]:
    """The window of every layer; None unless use_sliding_window."""
    window = window_of(hf_config) if hf_config.get("use_sliding_window", False) else None
    return (window,) * positive(hf_config, "num_hidden_layers")


def _sparse_layers(hf_config: HFConfig) -> list[int]:
    """Every decoder_sparse_step-th layer, apart from those of mlp_only_layers."""
    step, dense = positive(hf_config, "decoder_sparse_step"), layers_listed(hf_config, _DENSE)
    layers = range(step - 1, positive(hf_config, "num_hidden_layers"), step)
    return [layer for layer in layers if layer not in dense]
