"""Which class a config.json asks for, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from engine_service.hf_overrides import overridden
from engine_service.models.base import REGISTRY, CausalModel, ModelRegistry
from tidemill.runtime.errors import InvalidRequest, Unsupported

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
    (named("LlamaForCausalLM", block_size=4), "LlamaForCausalLM"),
    (named("LlamaForCausalLM", mask_token_id=9), "LlamaForCausalLM"),
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
    ({"d_model": 64}, "LLaDAModelLM"),
    ({"d_model": 64, "architectures": [], "model_type": None}, "LLaDAModelLM"),
    ({"d_model": None, "uses_shifted_prediction": True}, "DreamModel"),
    # A part of a name.
    (named("LLaDAForMaskedDiffusion", model_type="masked"), "LLaDAModelLM"),
    (named("SomebodysForCausalLM", model_type="tuned-llada"), "LLaDAModelLM"),
    ({"model_type": "dream_coder", **LLADA_KEYS}, "DreamModel"),
    (named("Dream_ForCausalLM"), "DreamModel"),
    # A length of blocks on a Qwen config.
    (named("Qwen2ForCausalLM", bd_size=32), "Fast_dLLM_QwenForCausalLM"),
    (named("Qwen3ForCausalLM", block_size=4, mask_token_id=9), "SDARForCausalLM"),
    ({"model_type": "qwen3", "block_size": 4}, "SDARForCausalLM"),
    (named("Qwen3ForCausalLM", block_size=None), "Qwen3ForCausalLM"),
    (named("Qwen3ForCausalLM", block_size=0), "Qwen3ForCausalLM"),
    # A mask token on a Qwen config, with the length under either name.
    (named("Qwen2ForCausalLM", mask_token_id=9, bd_size=32), "Fast_dLLM_QwenForCausalLM"),
    (named("Qwen2ForCausalLM", text_mask_token_id=9, block_size=4), "Fast_dLLM_QwenForCausalLM"),
    (named("Qwen3ForCausalLM", mask_token_id=0, block_size=4), "SDARForCausalLM"),
    (named("Qwen3ForCausalLM", text_mask_token_id=9, bd_size=4), "SDARForCausalLM"),
    ({"model_type": "qwen2", "mask_token_id": 9, "bd_size": 4}, "Fast_dLLM_QwenForCausalLM"),
    (
        named("Qwen2ForCausalLM", mask_token_id=None, text_mask_token_id=None, bd_size=None),
        "Qwen2ForCausalLM",
    ),
    (named("Qwen3ForCausalLM", model_type="qwen3", mask_token_id=None), "Qwen3ForCausalLM"),
]


@pytest.mark.parametrize(("config", "name"), CASES, ids=lambda value: str(value)[:60])
def test_found(registry: ModelRegistry, config: dict[str, Any], name: str) -> None:
    assert registry.find(config).__name__ == name


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "config.json without `architectures`"),
    ({"architectures": []}, "config.json without `architectures`"),
    (named("MambaForCausalLM", d_model=64, n_layers=2), "MambaForCausalLM"),
    (named("MPTForCausalLM", **LLADA_KEYS), "MPTForCausalLM"),
    ({"d_model": None}, "config.json without `architectures`"),
    # Classifiers share the model_type of the language model they are made from.
    (named("Qwen2ForSequenceClassification", model_type="qwen2"), "Qwen2ForSequenceClass"),
    ({"model_type": "qwen3"}, "config.json without `architectures`"),
    ({"model_type": "sdar_moe"}, "SDARMoeForCausalLM"),
    # Blocks nobody here decodes: never run as the autoregressive model they are made from.
    (named("Qwen3MoeForCausalLM", block_size=4), "SDARMoeForCausalLM"),
    (named("Qwen2ForCausalLM", block_size=4), "Qwen2ForCausalLM with block_size"),
    (named("Qwen3ForCausalLM", bd_size=32), "Qwen3ForCausalLM with bd_size"),
    (named("Qwen3MoeForCausalLM", mask_token_id=9, block_size=4), "SDARMoeForCausalLM"),
    (named("Qwen2ForSequenceClassification", mask_token_id=9), "Qwen2ForSequenceClass"),
    # Names of diffusion models that are not among those of this registry.
    (named("LLaDAMoEForMaskedLM"), "LLaDAMoEModelLM"),
    ({"model_type": "llada_moe"}, "LLaDAMoEModelLM"),
    (named("LLaDA2UniForCausalLM"), "LLaDA2MoeModelLM"),
]


@pytest.mark.parametrize(("config", "asked"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(registry: ModelRegistry, config: dict[str, Any], asked: str) -> None:
    with pytest.raises(Unsupported, match=f"^{asked}.* not supported; .*DreamModel, ") as caught:
        registry.find(config)
    assert (caught.value.reason, caught.value.param) == ("ARCHITECTURE_UNSUPPORTED", "model")


@pytest.mark.parametrize("name", [*AR[1:], "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("key", ["mask_token_id", "text_mask_token_id"])
@pytest.mark.parametrize("length", [{}, {"block_size": None}, {"bd_size": 0}])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_mask_token_without_a_block_length_is_refused(
    name: str, key: str, length: dict[str, Any], is_named: bool
) -> None:
    """It used to be served as the autoregressive model whose weights it shares."""
    family = {"Qwen2F": "qwen2", "Qwen3F": "qwen3", "Qwen3M": "qwen3_moe"}[name[:6]]
    config = (named(name) if is_named else {}) | {"model_type": family, key: 9, **length}
    with pytest.raises(InvalidRequest, match=rf"a mask token \({key} 9\), .* block length") as told:
        REGISTRY.find(config)
    assert (told.value.reason, told.value.param) == ("BLOCK_LENGTH_MISSING", "block_size")
    assert "--hf-overrides '{\"block_size\": N}'" in told.value.message
    found = REGISTRY.find(overridden(config, {"block_size": 4, "bd_size": None})).__name__
    assert found in ("FastDLLM", "SDAR", "SDARMoe")
    if is_named:
        assert REGISTRY.find(overridden(config, {key: None})) is REGISTRY.find(named(name))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (named("MDLM"), "MDLM"),
        (named("SMDMForCausalLM", uses_shifted_prediction=True), "SMDMForCausalLM"),
        ({"model_type": "mdlm", **LLADA_KEYS}, "mdlm"),
        (named("A2DForMaskedLM", model_type="a2d-mdlm"), "a2d-mdlm"),
    ],
)
def test_diffusion_models_without_a_backbone_are_refused_by_name(
    registry: ModelRegistry, config: dict[str, Any], name: str
) -> None:
    with pytest.raises(
        Unsupported, match=f"^{name} is a masked diffusion model .* no backb"
    ) as told:
        registry.find(config)
    assert (told.value.reason, told.value.param) == ("ARCHITECTURE_UNSUPPORTED", "model")
    said = overridden(config, {"architectures": ["LLaDAModelLM"]})
    assert registry.find(said).__name__ == "LLaDAModelLM", "the remedy that it tells"


def test_a_bare_name_is_no_list() -> None:
    with pytest.raises(InvalidRequest, match=r"""'{"architectures": \["DreamModel"\]}'"""):
        REGISTRY.find({"architectures": "DreamModel"})


def test_llada_names_what_is_missing() -> None:
    config = {"d_model": 64, "n_layers": 2}
    with pytest.raises(InvalidRequest, match="n_heads must be a positive integer, found None"):
        REGISTRY.find(config).read_traits(config, {})


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
