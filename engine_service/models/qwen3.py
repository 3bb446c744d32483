"""Qwen3, dense: per-head norms of queries and keys, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions
from engine_service.models.hf_config import decoder_traits, qwen_windows

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096}
"""What a config.json without these keys means for this architecture."""


@register_model("Qwen3ForCausalLM")
class Qwen3(Decoder):
    """Yang et al. 2025, arXiv 2505.09388."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = {**DEFAULTS, **hf_config}
        return decoder_traits(full, windows=qwen_windows(full))

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        bias = bool(hf_config.get("attention_bias", False))
        return DecoderOptions(qkv_bias=bias, output_bias=bias, qk_norm=True)
