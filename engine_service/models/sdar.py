"""SDAR: Qwen3's decoder trained to fill blocks of masked tokens (Cheng et al. 2025, arXiv
2510.06303). Only the traits differ: the mask is block-causal and logits are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.hf_config import (
    decoder_traits,
    mask_token_id,
    positive,
    qwen_windows,
)
from engine_service.models.qwen3 import DEFAULTS, Qwen3


@register_model("SDARForCausalLM")
class SDAR(Qwen3):
    """Blocks of `block_size` positions (4 unless config.json says otherwise), aligned at 0."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = {**DEFAULTS, "block_size": 4, **hf_config}
        full["architectures"] = hf_config.get("architectures") or ["SDARForCausalLM"]
        return decoder_traits(
            full,
            windows=qwen_windows(full),
            mask_block=positive(full, "block_size"),
            mask_token_id=mask_token_id(full, added_tokens),
            logits_shift=0,
            default_method="block_diffusion",
            methods=("block_diffusion",),
        )
