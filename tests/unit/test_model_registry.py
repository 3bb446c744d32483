"""Which class a config.json asks for, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from engine_service.models.base import REGISTRY, CausalModel, ModelRegistry
from tidemill.runtime.errors import Unsupported

AR = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BLOCK = ("SDARForCausalLM", "Fast_dLLM_QwenForCausalLM")
CANVAS = ("DreamModel", "LLaDAModelLM")


@pytest.fixture(scope="module")
def registry() -> ModelRegistry:
    """One class per name, so that a case does not depend on which models are built."""
    made = ModelRegistry()
    for name in (*AR, *BLOCK, *CANVAS):
        made.register(name)(type(name, (CausalModel,), {}))
    return made


def named(name: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [name], **keys}


LLADA_KEYS = {"d_model": 64, "n_heads": 4}

CASES: list[tuple[dict[str, Any], str]] = [
    # The first architecture, whatever else stands there.
    *[(named(name), name) for name in (*AR, *BLOCK, *CANVAS)],
    ({"architectures": ["LlamaForCausalLM", "DreamModel"]}, "LlamaForCausalLM"),
    (named("LlamaForCausalLM", model_type="llada"), "LlamaForCausalLM"),
    (named("LLaDAModelLM", uses_shifted_prediction=True), "LLaDAModelLM"),
    (named("SDARForCausalLM", block_size=4, mask_token_id=9), "SDARForCausalLM"),
    (named("Qwen2ForCausalLM", mask_token_id=9), "Qwen2ForCausalLM"),
    (named("LlamaForCausalLM", block_size=4), "LlamaForCausalLM"),
    # The model_type, of diffusion models.
    ({"model_type": "llada"}, "LLaDAModelLM"),
    ({"model_type": "Dream", "architectures": None}, "DreamModel"),
    (named("TunedDream", model_type="Dream"), "DreamModel"),
    ({"model_type": "sdar", "block_size": 4}, "SDARForCausalLM"),
    ({"model_type": "Fast_dLLM_Qwen", "bd_size": 32}, "Fast_dLLM_QwenForCausalLM"),
    ({"model_type": "Dream", **LLADA_KEYS}, "DreamModel"),
    # Keys.
    ({"uses_shifted_prediction": True}, "DreamModel"),
    ({"uses_shifted_prediction": True, **LLADA_KEYS}, "DreamModel"),
    ({"uses_shifted_prediction": False, **LLADA_KEYS}, "LLaDAModelLM"),
    (LLADA_KEYS, "LLaDAModelLM"),
    # A length of blocks on a Qwen config.
    (named("Qwen2ForCausalLM", bd_size=32), "Fast_dLLM_QwenForCausalLM"),
    (named("Qwen3ForCausalLM", block_size=4, mask_token_id=9), "SDARForCausalLM"),
    ({"model_type": "qwen3", "block_size": 4}, "SDARForCausalLM"),
    (named("Qwen3ForCausalLM", block_size=None), "Qwen3ForCausalLM"),
]


@pytest.mark.parametrize(("config", "name"), CASES, ids=lambda value: str(value)[:60])
def test_found(registry: ModelRegistry, config: dict[str, Any], name: str) -> None:
    assert registry.find(config).__name__ == name


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "config.json without `architectures`"),
    ({"architectures": []}, "config.json without `architectures`"),
    (named("MambaForCausalLM", d_model=64, n_layers=2), "MambaForCausalLM"),
    (named("MPTForCausalLM", **LLADA_KEYS), "MPTForCausalLM"),
    ({"d_model": 64}, "config.json without `architectures`"),
    # Classifiers share the model_type of the language model they are made from.
    (named("Qwen2ForSequenceClassification", model_type="qwen2"), "Qwen2ForSequenceClass"),
    ({"model_type": "qwen3"}, "config.json without `architectures`"),
    ({"model_type": "sdar_moe"}, "SDARMoeForCausalLM"),
    # Blocks nobody here decodes: never run as the autoregressive model they are made from.
    (named("Qwen3MoeForCausalLM", block_size=4), "SDARMoeForCausalLM"),
    (named("Qwen2ForCausalLM", block_size=4), "Qwen2ForCausalLM with block_size"),
    (named("Qwen3ForCausalLM", bd_size=32), "Qwen3ForCausalLM with bd_size"),
]


@pytest.mark.parametrize(("config", "asked"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(registry: ModelRegistry, config: dict[str, Any], asked: str) -> None:
    with pytest.raises(Unsupported, match=f"^{asked}.* not supported; .*DreamModel, ") as caught:
        registry.find(config)
    assert (caught.value.reason, caught.value.param) == ("ARCHITECTURE_UNSUPPORTED", "model")


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"model_type": "llada"}, "LLaDAModelLM"),
        ({"model_type": "Dream"}, "DreamModel"),
        ({"uses_shifted_prediction": True}, "DreamModel"),
        (LLADA_KEYS, "LLaDAModelLM"),
    ],
)
def test_full_canvas_models_need_no_architecture(keys: dict[str, Any], name: str) -> None:
    """They are found without one, and their traits name it."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "mask_token_id": 9,
        **keys,
    }
    assert REGISTRY.find(sizes).read_traits(sizes, {}).architecture == name


def test_a_name_is_taken_once(registry: ModelRegistry) -> None:
    with pytest.raises(AssertionError, match="DreamModel is registered twice"):
        registry.register("DreamModel")(CausalModel)
