"""Which architecture a config.json means. It knows names and keys, and none of the classes.

A diffusion model that is taken for an autoregressive one answers with nonsense and no error, so
whatever says that it is one is heeded before its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tidemill.runtime.errors import InvalidRequest, Unsupported

MASK_KEYS = ("mask_token_id", "text_mask_token_id")
"""What configs call the mask token, the usual name first."""
BLOCK_KEYS = ("bd_size", "block_size")
"""What configs call the length of a block."""


class _Backbone(NamedTuple):
    """What becomes of a Qwen that is trained in blocks."""

    architecture: str
    length: str
    """The key of its checkpoints: it alone says that the model is one."""


_BACKBONES = {
    "qwen2": _Backbone("Fast_dLLM_QwenForCausalLM", "bd_size"),
    "qwen3": _Backbone("SDARForCausalLM", "block_size"),
    "qwen3moe": _Backbone("SDARMoeForCausalLM", "block_size"),
}
"""By the weights that they share with it."""

_MODEL_TYPES = {
    "Dream": "DreamModel",
    "Fast_dLLM_Qwen": "Fast_dLLM_QwenForCausalLM",
    "llada": "LLaDAModelLM",
    "llada2_moe": "LLaDA2MoeModelLM",
    "sdar": "SDARForCausalLM",
    "sdar_moe": "SDARMoeForCausalLM",
}
"""Diffusion models by model_type. Autoregressive ones go by their architecture alone, because
classifiers and reward models share their model_type."""

_NAMES = {
    "llada2": "LLaDA2MoeModelLM",
    "lladamoe": "LLaDAMoEModelLM",
    "llada": "LLaDAModelLM",
    "dream": "DreamModel",
}
"""Diffusion models by a part of their name; of several the first."""

_NO_BACKBONE = ("mdlm", "smdm")
"""Diffusion models by a part of their name that no class here computes."""


def find_architecture(hf_config: Mapping[str, Any], known: Collection[str]) -> str:
    """The architecture that a config.json means, known or not; empty if it gives no sign of one.

    First what a Qwen config says of blocks and masks, whatever its name; then by the architecture's
    name, by model_type, by a part of either, by keys of the diffusion models that come without.
    Raises InvalidRequest for a block model without a block length, Unsupported for a diffusion
    model that has no class.
    """
    named = _named(hf_config.get("architectures") or ())
    model_type = str(hf_config.get("model_type") or "")
    if block_model := _block_model(hf_config, named, model_type):
        return block_model
    if named in known:
        return named
    if model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    if by_part := _by_part_of(named) or _by_part_of(model_type):
        return by_part
    if hf_config.get("uses_shifted_prediction"):
        return "DreamModel"
    if not named and hf_config.get("d_model") is not None:
        return "LLaDAModelLM"
    return named


def _named(architectures: Any) -> str:
    """The first one; raises InvalidRequest for a bare name, whose first letter that would be."""
    if isinstance(architectures, str):
        raise InvalidRequest(
            f"config.json: architectures is {architectures!r} and must be a list: --hf-overrides "
            f'\'{{"architectures": ["{architectures}"]}}\'',
            param="architectures",
        )
    names = architectures if isinstance(architectures, list | tuple) else [architectures]
    if not all(isinstance(name, str) for name in names):
        raise InvalidRequest(
            f"config.json: architectures is {architectures!r} and must be a list of names",
            param="architectures",
        )
    return next(iter(names), "")


def _block_model(hf_config: Mapping[str, Any], named: str, model_type: str) -> str:
    """Of a Qwen config; empty where it says nothing of blocks."""
    family = _plain(named.removesuffix("ForCausalLM") or model_type)
    length = next((key for key in BLOCK_KEYS if hf_config.get(key)), "")
    mask = next((key for key in MASK_KEYS if hf_config.get(key) is not None), "")
    backbone = _BACKBONES.get(family)
    if mask and backbone:
        if not length:
            raise _no_length(named or model_type, mask, hf_config[mask], backbone)
        return backbone.architecture
    if not family.startswith("qwen") or not length:
        return ""
    if backbone and hf_config.get(backbone.length):
        return backbone.architecture
    return f"{named or model_type} with {length}"


def _no_length(name: str, key: str, mask: object, backbone: _Backbone) -> InvalidRequest:
    return InvalidRequest(
        f"config.json of this {name} names a mask token ({key} {mask!r}), so it is a diffusion "
        f"model and would be served as {backbone.architecture}, but no block length "
        f"({' or '.join(BLOCK_KEYS)}): pass the one that it was trained with, --hf-overrides "
        f"'{{\"block_size\": N}}', or --hf-overrides '{{\"{key}\": null}}' if it is autoregressive "
        "all the same",
        reason="BLOCK_LENGTH_MISSING",
        param="block_size",
    )


def _by_part_of(name: str) -> str:
    """Raises Unsupported for a name of those that no class computes."""
    plain = _plain(name)
    for part in _NO_BACKBONE:
        if part in plain:
            raise Unsupported(
                f"{name} is a masked diffusion model by its name ({part}), and this build has no "
                f"backbone of {part}; if its weights are those of a supported architecture, name "
                'that one, for example --hf-overrides \'{"architectures": ["LLaDAModelLM"]}\'',
                reason="ARCHITECTURE_UNSUPPORTED",
                param="model",
            )
    return next((found for part, found in _NAMES.items() if part in plain), "")


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
