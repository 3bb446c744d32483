"""Fast-dLLM v2: Qwen2's decoder trained to fill blocks of masked tokens (Wu et al. 2025, arXiv
2509.26328). Only the traits differ: the mask is block-causal, and logits stay shifted by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.hf_config import block_length, logits_shift, mask_token_id
from engine_service.models.qwen2 import Qwen2

_BLOCK = 32
_MASK_TOKEN = {"<|mdm_mask|>": 151665}
"""The published mask token, for checkpoints that do not name theirs."""


@register_model("Fast_dLLM_QwenForCausalLM")
class FastDLLM(Qwen2):
    """Blocks of `bd_size` positions (32 unless config.json says otherwise), aligned at 0."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        named = hf_config.get("architectures") or ["Fast_dLLM_QwenForCausalLM"]
        # Qwen2, which is asked below, would refuse blocks that are not causal.
        full = {**hf_config, "architectures": named, "is_causal": True}
        return dataclasses.replace(
            super().read_traits(full, added_tokens),
            mask_block=block_length(full, _BLOCK),
            mask_token_id=mask_token_id(full, {**_MASK_TOKEN, **added_tokens}),
            logits_shift=logits_shift(full, 1),
            default_method="block_diffusion",
            methods=("block_diffusion",),
        )
