"""LLaDA2: the decoder of Ling 2.0, mostly experts, trained to fill blocks of masked tokens
(Bie et al. 2025, arXiv 2512.15745). It does not know how masks are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_service.layers.routing import BlockSigmoidRouter, Router
from engine_service.models.bailing_moe_v2 import BailingMoeV2, expert_shares, ling_traits
from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.hf_config import (
    expert_counts,
    logits_shift,
    mask_token_id,
    positive,
    with_defaults,
)
from tidemill.runtime.errors import InvalidRequest, Unsupported

_DEFAULTS: dict[str, Any] = {
    "eos_token_id": 156892,
    "first_k_dense_replace": 0,
    "n_group": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
"""What a config.json without these keys means for this architecture."""

_BLOCK = 32
_MASK_TOKEN = {"<|mdm_mask|>": 156895}
"""The published mask token under the name that is looked up last, for checkpoints without one."""


@register_model("LLaDA2MoeModelLM")
class LLaDA2Moe(BailingMoeV2):
    """LLaDA2.0 to 2.2. Blocks of 32 positions unless config.json says otherwise, aligned at 0."""

    defaults: ClassVar[HFConfig] = _DEFAULTS

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        full = with_defaults(cls.defaults, hf_config)
        full["architectures"] = hf_config.get("architectures") or ["LLaDA2MoeModelLM"]
        shift = logits_shift(full, 0)
        by_block = full.get("expert_capacity") not in (None, full.get("num_experts"))
        if shift and by_block:
            raise Unsupported(
                "config.json: uses_shifted_prediction = True is not supported with expert_capacity "
                f"{full['expert_capacity']}: the position ahead of a block would choose experts "
                "with it; set it to false",
                reason="TRAIT_UNSUPPORTED",
                param="uses_shifted_prediction",
            )
        return ling_traits(
            full,
            mask_block=_block(full),
            mask_token_id=mask_token_id(full, {**_MASK_TOKEN, **added_tokens}),
            logits_shift=shift,
            default_method="block_diffusion",
            methods=("block_diffusion",),
            routes_by_block=by_block,
        )

    @classmethod
    def router(cls, hf_config: HFConfig) -> Router:
        """Version 2.2 chooses the experts of a whole block first (`expert_capacity`).

        Raises InvalidRequest for a capacity that a token's experts do not fit in.
        """
        if hf_config.get("expert_capacity") is None:
            return super().router(hf_config)
        num_experts, per_token = expert_counts(hf_config)
        capacity = positive(hf_config, "expert_capacity")
        if not per_token <= capacity <= num_experts:
            raise InvalidRequest(
                f"config.json: expert_capacity {capacity} must be at least num_experts_per_tok "
                f"{per_token} and at most num_experts {num_experts}",
                param="expert_capacity",
            )
        return BlockSigmoidRouter(
            **expert_shares(hf_config), block=_block(hf_config), capacity=capacity
        )


def _block(hf_config: HFConfig) -> int:
    named = {"block_size": hf_config.get("block_length") or hf_config.get("block_size") or _BLOCK}
    return positive(named, "block_size")
