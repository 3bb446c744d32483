"""SDAR with experts: Qwen3-MoE's decoder trained to fill blocks of masked tokens (Cheng et al.
2025, arXiv 2510.06303). Only the traits differ: the mask is block-causal, logits are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.hf_config import (
    block_length,
    decoder_traits,
    logits_shift,
    mask_token_id,
)
from engine_service.models.qwen3_moe import DEFAULTS, EXPERT_KEYS, Qwen3Moe, windows
from engine_service.models.sdar import BLOCK, MASK_TOKEN


@register_model("SDARMoeForCausalLM")
class SDARMoe(Qwen3Moe):
    """Blocks of `block_size` positions (4 unless config.json says otherwise), aligned at 0."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = {**DEFAULTS, **hf_config}
        full["architectures"] = hf_config.get("architectures") or ["SDARMoeForCausalLM"]
        return decoder_traits(
            full,
            windows=windows(full),
            implements=EXPERT_KEYS,
            mask_block=block_length(full, BLOCK),
            mask_token_id=mask_token_id(full, {**MASK_TOKEN, **added_tokens}),
            logits_shift=logits_shift(full, 0),
            default_method="block_diffusion",
            methods=("block_diffusion",),
        )
