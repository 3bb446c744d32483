"""Qwen2 and Qwen2.5: Llama's decoder with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions
from engine_service.models.hf_config import decoder_traits, qwen_windows

_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}
"""What a config.json without these keys means for this architecture."""


@register_model("Qwen2ForCausalLM")
class Qwen2(Decoder):
    """Yang et al. 2024, arXiv 2407.10671. Sliding windows are off unless use_sliding_window."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = {**_DEFAULTS, **hf_config}
        return decoder_traits(full, windows=qwen_windows(full))

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        return DecoderOptions(qkv_bias=True)
