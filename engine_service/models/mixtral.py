"""Mixtral: Mistral's decoder with experts in every layer, under names of their own."""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.layers.experts import ExpertNames, Mixture
from engine_service.layers.routing import SoftmaxRouter
from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions, TensorNames
from engine_service.models.hf_config import (
    decoder_traits,
    expert_counts,
    positive,
    window_of,
    with_defaults,
)

_DEFAULTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
"""What a config.json without these keys means for this architecture."""


@register_model("MixtralForCausalLM")
class Mixtral(Decoder):
    """Jiang et al. 2024, arXiv 2401.04088. A null sliding_window means full attention."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = with_defaults(_DEFAULTS, hf_config)
        windows = (window_of(full),) * positive(full, "num_hidden_layers")
        implements = ("num_experts", "num_local_experts")
        return decoder_traits(full, windows=windows, implements=implements)

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        full = {**_DEFAULTS, **hf_config}
        num_experts, per_token = expert_counts(full)
        mixture = Mixture(
            router=SoftmaxRouter(num_experts=num_experts, per_token=per_token, renormalised=True),
            inner_size=positive(full, "intermediate_size"),
            names=ExpertNames(gate="w1", up="w3", down="w2"),
        )
        return DecoderOptions(
            mixtures=dict.fromkeys(range(positive(full, "num_hidden_layers")), mixture),
            names=TensorNames(feed_forward="block_sparse_moe"),
        )
