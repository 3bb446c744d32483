"""Dream: Qwen2's decoder trained to fill masks anywhere in a text (Ye et al. 2025, arXiv
2508.15487). Only the traits differ: nothing is hidden from a position and logits stay shifted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from engine_service.core.step import FULL
from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.hf_config import logits_shift, mask_token_id
from engine_service.models.qwen2 import Qwen2
from tidemill.runtime.errors import Unsupported

_MASK_TOKEN = {"<|mask|>": 151666}
"""The published mask token, for checkpoints that do not name theirs."""


@register_model("DreamModel")
class Dream(Qwen2):
    """Dream, Dream-Coder and DiffuCoder. Position p is predicted by query p - 1, as in Qwen2."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        if hf_config.get("use_sliding_window"):
            raise Unsupported(
                "config.json: use_sliding_window = True is not supported for Dream, whose "
                "positions see the whole sequence; set it to false",
                reason="TRAIT_UNSUPPORTED",
                param="use_sliding_window",
            )
        named = hf_config.get("architectures") or ["DreamModel"]
        # Qwen2, which is asked below, would refuse what sees the whole sequence.
        full = {**hf_config, "architectures": named, "is_causal": True}
        return dataclasses.replace(
            super().read_traits(full, added_tokens),
            mask_block=FULL,
            mask_token_id=mask_token_id(full, {**_MASK_TOKEN, **added_tokens}),
            logits_shift=logits_shift(full, 1),
            default_method="full_canvas",
            methods=("full_canvas",),
        )
