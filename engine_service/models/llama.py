"""Llama 2 and 3, and the many models published under its name. It adds nothing to the decoder."""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions
from engine_service.models.hf_config import decoder_traits, full_windows


@register_model("LlamaForCausalLM")
class Llama(Decoder):
    """Touvron et al. 2023, arXiv 2302.13971; grouped-query attention since Llama 2 70B."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        return decoder_traits(hf_config, windows=full_windows(hf_config))

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        bias = bool(hf_config.get("attention_bias", False))
        return DecoderOptions(
            qkv_bias=bias, output_bias=bias, mlp_bias=bool(hf_config.get("mlp_bias", False))
        )
