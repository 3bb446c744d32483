"""SDAR: Qwen3's decoder trained to fill blocks of masked tokens (Cheng et al. 2025, arXiv
2510.06303). Only the traits differ: the mask is block-causal and logits are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.hf_config import decoder_traits, positive, qwen_windows
from engine_service.models.qwen3 import DEFAULTS, Qwen3
from tidemill.runtime.errors import InvalidRequest

_MASK_TOKENS = ("<|MASK|>", "<|mask|>", "<|mdm_mask|>")


@register_model("SDARForCausalLM")
class SDAR(Qwen3):
    """Blocks of `block_size` positions (4 unless config.json says otherwise), aligned at 0."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = {**DEFAULTS, "block_size": 4, **hf_config}
        return decoder_traits(
            full,
            windows=qwen_windows(full),
            mask_block=positive(full, "block_size"),
            mask_token_id=_mask_token_id(full, added_tokens),
            logits_shift=0,
            default_method="block_diffusion",
            methods=("block_diffusion",),
        )


def _mask_token_id(hf_config: HFConfig, added_tokens: Mapping[str, int]) -> int:
    """config.json first, then the tokenizer's added tokens; raises InvalidRequest without one."""
    found = hf_config.get("mask_token_id")
    if found is None:
        found = next((added_tokens[name] for name in _MASK_TOKENS if name in added_tokens), None)
    vocab_size = positive(hf_config, "vocab_size")
    if found is None or not 0 <= found < vocab_size:
        raise InvalidRequest(
            f"the mask token of this block-diffusion model is {found!r}, which is not an id below "
            f"the vocabulary size {vocab_size}: set mask_token_id in config.json, or add one of "
            f"{', '.join(_MASK_TOKENS)} to the tokenizer's added tokens",
            param="mask_token_id",
        )
    return found
