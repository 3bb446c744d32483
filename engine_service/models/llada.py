"""LLaDA: Llama's decoder without a causal mask, under names of its own (Nie et al. 2025, arXiv
2502.09992). Tensor names and config keys are translated; it does not know how masks are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_service.core.step import FULL
from engine_service.layers.slots import Slots
from engine_service.models.base import HFConfig, ModelTraits, register_model
from engine_service.models.decoder import Decoder
from engine_service.models.decoder_layer import DecoderOptions
from engine_service.models.hf_config import (
    decoder_traits,
    full_windows,
    logits_shift,
    mask_token_id,
    positive,
)
from tidemill.runtime.errors import Unsupported

_SIZES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_sequence_length": "max_position_embeddings",
}
"""LLaDA's own keys, and what other decoders call them; the latter are read where the own is not."""

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "activation_type": (None, "silu"),
    "alibi": (None, False),
    "attention_layer_norm": (None, False),
    "bias_for_layer_norm": (None, False),
    "block_group_size": (None, 1),
    "block_type": (None, "llama"),
    "clip_qkv": (None,),
    "include_bias": (None, False),
    "include_qkv_bias": (None, False),
    "input_emb_norm": (None, False),
    "layer_norm_type": (None, "rms"),
    "layer_norm_with_affine": (None, True),
    "multi_query_attention": (None, False),
    "rope": (None, True),
    "rope_full_precision": (None, True),
    "scale_logits": (None, False),
}
"""Keys of the published class that change the arithmetic or the tensors, with what is built here;
a config.json without them means the published checkpoints."""

_MASK_TOKEN = {"<|mdm_mask|>": 126336}
"""The published mask token, for checkpoints that do not name theirs."""

_EOT_TOKEN = 126348
"""<|eot_id|> of the published vocabulary, which no published config.json lists: checkpoints that
have the published mask token, and no tokenizer beside them, have it too."""

_OWN_NAMES = {
    "model.embed_tokens": "wte",
    "model.norm": "ln_f",
    "lm_head": "ff_out",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_LAYERS = "model.layers."


@register_model("LLaDAModelLM")
class LLaDA(Decoder):
    """LLaDA 8B and 1.5, iLLaDA: every position sees the whole sequence, masks included."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        _refuse_variants(hf_config)
        full = _as_decoder(hf_config)
        mask = mask_token_id(full, {**_MASK_TOKEN, **added_tokens})
        is_published = mask in _MASK_TOKEN.values() and full["vocab_size"] > _EOT_TOKEN
        return decoder_traits(
            full,
            windows=full_windows(full),
            mask_block=FULL,
            mask_token_id=mask,
            eot_token_ids=(_EOT_TOKEN,) if is_published else (),
            logits_shift=logits_shift(full, 0),
            default_method="full_canvas",
            methods=("full_canvas",),
        )

    @classmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        return DecoderOptions()

    def weight_slots(self) -> Slots:
        return {_own_name(name): slot for name, slot in super().weight_slots().items()}

    def ignores(self, name: str) -> bool:
        tied_copy = name == _own_name("lm_head.weight") and self.traits.tie_embeddings
        return tied_copy or super().ignores(name)


def _refuse_variants(hf_config: HFConfig) -> None:
    """Raises Unsupported for a variant of the published class that no released model uses."""
    for key, implemented in _IMPLEMENTED.items():
        if hf_config.get(key) not in implemented:
            raise Unsupported(
                f"config.json: {key} = {hf_config[key]!r} is not supported for LLaDA, only "
                f"{implemented[-1]!r}; choose a checkpoint with that",
                reason="TRAIT_UNSUPPORTED",
                param=key,
            )


def _as_decoder(hf_config: HFConfig) -> dict[str, Any]:
    """config.json under the keys that every other decoder uses."""
    full: dict[str, Any] = {"rms_norm_eps": 1e-5, **hf_config}
    full["architectures"] = hf_config.get("architectures") or ["LLaDAModelLM"]
    for own, usual in _SIZES.items():
        if hf_config.get(own) is not None or hf_config.get(usual) is None:
            full[usual] = positive(hf_config, own)
    # The matrices may have more rows than there are tokens.
    if hf_config.get("embedding_size") is not None:
        full["vocab_size"] = positive(hf_config, "embedding_size")
    if hf_config.get("n_kv_heads") is not None:
        full["num_key_value_heads"] = positive(hf_config, "n_kv_heads")
    if hf_config.get("mlp_hidden_size") is not None:
        full["intermediate_size"] = positive(hf_config, "mlp_hidden_size")
    elif "intermediate_size" not in hf_config:
        full["intermediate_size"] = full["hidden_size"] * positive(hf_config, "mlp_ratio")
    if "weight_tying" in hf_config:
        full["tie_word_embeddings"] = hf_config["weight_tying"]
    return full


def _own_name(name: str) -> str:
    """LLaDA's name of a decoder's tensor."""
    part = name.removesuffix(".weight")
    if not part.startswith(_LAYERS):
        return f"model.transformer.{_OWN_NAMES[part]}.weight"
    layer, part = part.removeprefix(_LAYERS).split(".", 1)
    return f"model.transformer.blocks.{layer}.{_OWN_NAMES[part]}.weight"
