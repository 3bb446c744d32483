"""Mistral 7B and its descendants: Llama's decoder, every layer with the same sliding window."""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions
from engine_service.models.hf_config import decoder_traits, positive, window_of

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}
"""What a config.json without these keys means for this architecture."""


@register_model("MistralForCausalLM")
class Mistral(Decoder):
    """Jiang et al. 2023, arXiv 2310.06825. A null sliding_window means full attention."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = {**_DEFAULTS, **hf_config}
        windows = (window_of(full),) * positive(full, "num_hidden_layers")
        return decoder_traits(full, windows=windows)

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        return DecoderOptions()
