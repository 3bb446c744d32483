"""SDAR: Qwen3's decoder trained to fill blocks of masked tokens (Cheng et al. 2025, arXiv
2510.06303). Only the traits differ: the mask is block-causal and logits are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.hf_config import (
    block_length,
    decoder_traits,
    logits_shift,
    mask_token_id,
    qwen_windows,
)
from engine_service.models.qwen3 import DEFAULTS, Qwen3

BLOCK = 4
"""Of the published checkpoints, like the mask token, for those that do not name theirs."""
MASK_TOKEN = {"<|mdm_mask|>": 151669}
"""Under the name that is looked up last."""


@register_model("SDARForCausalLM")
class SDAR(Qwen3):
    """Blocks of `block_size` positions (4 unless config.json says otherwise), aligned at 0."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = {**DEFAULTS, **hf_config}
        full["architectures"] = hf_config.get("architectures") or ["SDARForCausalLM"]
        return decoder_traits(
            full,
            windows=qwen_windows(full),
            mask_block=block_length(full, BLOCK),
            mask_token_id=mask_token_id(full, {**MASK_TOKEN, **added_tokens}),
            logits_shift=logits_shift(full, 0),
            default_method="block_diffusion",
            methods=("block_diffusion",),
        )
