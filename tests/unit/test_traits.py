"""What config.json says becomes traits; what nobody implements is refused by name."""

from typing import Any

import pytest

from engine_service.core.step import FULL
from engine_service.models.base import REGISTRY, ModelTraits
from tidemill.runtime.errors import InvalidRequest, Unsupported

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


def traits(architecture: str, added: dict[str, int] | None = None, **changes: Any) -> ModelTraits:
    config = {**BASE, "architectures": [architecture], **changes}
    return REGISTRY.find(config).read_traits(config, added or {})


def read_whole(config: dict[str, Any]) -> None:
    """All that a decoder reads of a config.json before there is a tensor."""
    kind: Any = REGISTRY.find(config)
    kind.read_traits(config, {})
    kind.options(config)


def mask_of(architecture: str) -> int | None:
    """A mask token, for all but those that it would make another architecture of."""
    return None if architecture.startswith("Qwen") else 3


IMPLEMENTED = {
    "BailingMoeV2ForCausalLM": {"num_experts", "partial_rotary_factor"},
    "BertForSequenceClassification": {"hidden_act"},
    "BertModel": {"hidden_act"},
    "LLaDA2MoeModelLM": {"num_experts", "partial_rotary_factor"},
    "LLaDAMoEModelLM": {"num_experts", "partial_rotary_factor"},
    "MixtralForCausalLM": {"num_experts"},
    "Qwen3MoeForCausalLM": {"num_experts"},
    "RobertaForSequenceClassification": {"hidden_act"},
    "RobertaModel": {"hidden_act"},
    "SDARMoeForCausalLM": {"num_experts"},
    "XLMRobertaForSequenceClassification": {"hidden_act"},
    "XLMRobertaModel": {"hidden_act"},
}
"""Keys that most architectures refuse, and that these read."""


def test_every_architecture_is_found_by_name() -> None:
    assert REGISTRY.names() == (
        "BailingMoeV2ForCausalLM",
        "BertForSequenceClassification",
        "BertModel",
        "DreamModel",
        "Fast_dLLM_QwenForCausalLM",
        "LLaDA2MoeModelLM",
        "LLaDAMoEModelLM",
        "LLaDAModelLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "RobertaForSequenceClassification",
        "RobertaModel",
        "SDARForCausalLM",
        "SDARMoeForCausalLM",
        "XLMRobertaForSequenceClassification",
        "XLMRobertaModel",
    )
    for name in REGISTRY.names():
        assert traits(name, mask_token_id=mask_of(name)).architecture == name


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(
        Unsupported, match=r"MambaForCausalLM .*LlamaForCausalLM, Mistral"
    ) as caught:
        traits("MambaForCausalLM")
    assert caught.value.reason == "ARCHITECTURE_UNSUPPORTED"
    with pytest.raises(Unsupported, match="without `architectures`"):
        REGISTRY.find({})


def test_plain_fields() -> None:
    got = traits("LlamaForCausalLM", rms_norm_eps=1e-5, tie_word_embeddings=True, dtype="bfloat16")
    assert (got.num_layers, got.num_heads, got.num_kv_heads, got.head_dim) == (4, 8, 2, 8)
    assert (got.norm_eps, got.tie_embeddings, got.dtype) == (1e-5, True, "bfloat16")
    assert (got.eos_token_ids, got.max_model_len, got.windows) == ((7,), 512, (None,) * 4)
    assert (got.mask_block, got.logits_shift, got.mask_token_id) == (1, 1, None)
    assert (got.default_method, got.methods) == ("autoregressive", ("autoregressive",))


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_number_format_of_the_checkpoint(spelling: dict[str, str], name: str) -> None:
    assert traits("LlamaForCausalLM", **spelling).dtype == name


@pytest.mark.parametrize(("raw", "ids"), [(None, ()), (5, (5,)), ([5, 6], (5, 6))])
def test_stop_tokens(raw: Any, ids: tuple[int, ...]) -> None:
    assert traits("Qwen3ForCausalLM", eos_token_id=raw).eos_token_ids == ids


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 32}, (32,) * 4),
        ("LlamaForCausalLM", {"sliding_window": 32}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 32, "max_window_layers": 2}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 32, "max_window_layers": 3, "use_sliding_window": True},
            (None, None, None, 32),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_windows(
    architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert traits(architecture, **changes).windows == windows


def test_heads_default_as_the_architecture_says() -> None:
    absent = {"num_key_value_heads": None}
    assert traits("LlamaForCausalLM", **absent).num_kv_heads == 8
    assert traits("Qwen3ForCausalLM").head_dim == 128
    assert traits("Qwen2ForCausalLM").head_dim == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"attn_logit_softcapping": 50.0},
        {"is_causal": False},
        {"use_bidirectional_attention": True},
        {"final_logit_softcapping": 30.0},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"num_experts": 8},
        {"dtype": "float8_e4m3fn"},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("architecture", REGISTRY.names())
def test_unknown_traits_are_refused(architecture: str, changes: dict[str, Any]) -> None:
    turns = not architecture.startswith(("Bert", "Roberta", "XLMRoberta"))
    named = "rope_type" if "rope_scaling" in changes and turns else next(iter(changes))
    mask = mask_of(architecture)
    sees_behind = named == "is_causal" and traits(architecture, mask_token_id=mask).mask_block > 1
    if sees_behind or named in IMPLEMENTED.get(architecture, ()):
        traits(architecture, mask_token_id=mask, **changes)
        return
    with pytest.raises(Unsupported, match="not supported") as caught:
        traits(architecture, mask_token_id=mask, **changes)
    assert caught.value.param == named


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"num_hidden_layers": 0},
        {"vocab_size": "100"},
        {"num_key_value_heads": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_impossible_sizes_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(changes))):
        traits("LlamaForCausalLM", **changes)


def test_unknown_layer_types_are_refused() -> None:
    types = ["full_attention"] * 3 + ["linear_attention"]
    with pytest.raises(Unsupported, match="linear_attention"):
        traits("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=types)


@pytest.mark.parametrize(
    ("config", "added", "mask"),
    [
        ({"mask_token_id": 9}, {"<|MASK|>": 11}, 9),
        ({}, {"<|MASK|>": 11, "<|mask|>": 12}, 11),
        ({}, {"<|mask|>": 12}, 12),
        ({"mask_token_id": None}, {"<|mdm_mask|>": 13}, 13),
        ({"text_mask_token_id": 9}, {"<|MASK|>": 11}, 9),
        ({"text_mask_token_id": 9, "mask_token_id": 0}, {}, 0),
        ({"vocab_size": 151936}, {"<|mdm_mask|>": 13}, 13),
        ({"vocab_size": 151936}, {"<|im_end|>": 13}, 151669),
    ],
)
@pytest.mark.parametrize("architecture", ["SDARForCausalLM", "SDARMoeForCausalLM"])
def test_mask_token(
    architecture: str, config: dict[str, Any], added: dict[str, int], mask: int
) -> None:
    got = traits(architecture, added, block_size=8, **config)
    assert (got.mask_token_id, got.mask_block, got.logits_shift) == (mask, 8, 0)


@pytest.mark.parametrize(
    ("config", "added"), [({}, {}), ({"mask_token_id": 100}, {}), ({"mask_token_id": "9"}, {})]
)
def test_no_mask_token_refuses_to_start(config: dict[str, Any], added: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="mask_token_id"):
        traits("SDARForCausalLM", added, **config)


def test_block_size_defaults_to_the_published_one() -> None:
    assert traits("SDARForCausalLM", mask_token_id=1).mask_block == 4


@pytest.mark.parametrize(
    ("architecture", "keys", "block", "shift"),
    [
        ("SDARForCausalLM", {"block_size": None}, 4, 0),
        ("SDARForCausalLM", {"bd_size": 8}, 8, 0),
        ("SDARForCausalLM", {"bd_size": 8, "block_size": 8}, 8, 0),
        ("Fast_dLLM_QwenForCausalLM", {"bd_size": None}, 32, 1),
        ("Fast_dLLM_QwenForCausalLM", {"block_size": 16}, 16, 1),
        ("Fast_dLLM_QwenForCausalLM", {"uses_shifted_prediction": False}, 32, 0),
        ("Fast_dLLM_QwenForCausalLM", {"uses_shifted_prediction": None}, 32, 1),
        ("SDARForCausalLM", {"uses_shifted_prediction": True}, 4, 1),
        ("SDARMoeForCausalLM", {"uses_shifted_prediction": True}, 4, 1),
        ("LLaDA2MoeModelLM", {"uses_shifted_prediction": True}, 32, 1),
        ("DreamModel", {"uses_shifted_prediction": False}, FULL, 0),
        ("LLaDAModelLM", {"uses_shifted_prediction": True}, FULL, 1),
        ("LLaDAMoEModelLM", {"uses_shifted_prediction": True}, FULL, 1),
    ],
)
def test_block_and_shift_may_be_said(
    architecture: str, keys: dict[str, Any], block: int, shift: int
) -> None:
    got = traits(architecture, mask_token_id=3, **keys)
    assert (got.mask_block, got.logits_shift) == (block, shift)


def test_two_lengths_of_a_block_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="bd_size 32 and block_size 8 are two lengths"):
        traits("Fast_dLLM_QwenForCausalLM", mask_token_id=3, bd_size=32, block_size=8)


def test_a_block_that_chooses_its_experts_together_has_no_shift() -> None:
    shifted = {"mask_token_id": 3, "uses_shifted_prediction": True, "num_experts": 16}
    with pytest.raises(Unsupported, match=r"expert_capacity 8: .* set it to false"):
        traits("LLaDA2MoeModelLM", expert_capacity=8, **shifted)
    assert traits("LLaDA2MoeModelLM", expert_capacity=16, **shifted).logits_shift == 1


@pytest.mark.parametrize("wrong", [0, -3, "wide", 2.5, True], ids=str)
@pytest.mark.parametrize(
    "name",
    ["MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"],
)
def test_a_window_that_is_no_size_is_named(name: str, wrong: Any) -> None:
    """The attention library was blamed for the NaN that it computes."""
    window = {"sliding_window": wrong, "use_sliding_window": True, "max_window_layers": 0}
    with pytest.raises(InvalidRequest, match="sliding_window must be a positive integer"):
        traits(name, **window)


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("wrong", [-2, "2"], ids=str)
def test_sizes_of_heads_that_are_none_are_named(key: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{key} must be a positive integer"):
        traits("LlamaForCausalLM", **{key: wrong})


@pytest.mark.parametrize(
    ("name", "key"),
    [("LlamaForCausalLM", "rms_norm_eps"), ("BertModel", "layer_norm_eps")],
)
@pytest.mark.parametrize("wrong", [-1.0, "tiny", None, float("nan"), 10**400], ids=str)
def test_what_norms_cannot_add_is_named(name: str, key: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{key} must be a number from 0 on"):
        traits(name, **{key: wrong})


@pytest.mark.parametrize(
    "name",
    ["BailingMoeV2ForCausalLM", "LLaDA2MoeModelLM", "LlamaForCausalLM", "MixtralForCausalLM"],
)
@pytest.mark.parametrize("by_layer", [False, True])
def test_defaults_are_not_said_over_rope_parameters(name: str, by_layer: bool) -> None:
    """A scaling under the older key left them without what they say beside it."""
    turns = not name.startswith(("Llama", "Mixtral"))
    said = {"rope_type": "default", "rope_theta": 5e3} | (
        {"partial_rotary_factor": 0.25} if turns else {}
    )
    for scaling in ({}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}):
        own = {"full_attention": said} if by_layer and not scaling else said
        rope = traits(name, mask_token_id=3, head_dim=64, rope_parameters=own, **scaling).rope
        assert rope is not None
        assert (rope.theta, rope.rotary_dim) == (5e3, 16 if turns else 64)


@pytest.mark.parametrize(
    "name", [name for name in REGISTRY.names() if not name.startswith(("Bert", "Rob", "XLM"))]
)
def test_layer_types_are_never_ignored(name: str) -> None:
    """A layer that should see a window saw everything, or the other way round."""
    mask, window = mask_of(name), {"sliding_window": 8 if name.startswith("Mi") else None}
    own = ("full_attention", "sliding_attention")[name.startswith("Mi")]
    types = [own] * 4
    assert traits(name, mask_token_id=mask, layer_types=types, **window).num_layers == 4
    for wrong in ({"full_attention", "sliding_attention"} - {own}).pop(), "chunked_attention":
        with pytest.raises(Unsupported, match=f"'{wrong}' for layer 3, which is '{own}'") as told:
            traits(name, mask_token_id=mask, layer_types=[*types[:3], wrong], **window)
        assert told.value.param == "layer_types"


@pytest.mark.parametrize("wrong", [-1, "1", 1.5, True], ids=str)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("BailingMoeV2ForCausalLM", "first_k_dense_replace"),
        ("BailingMoeV2ForCausalLM", "num_shared_experts"),
        ("BertModel", "type_vocab_size"),
        ("LLaDA2MoeModelLM", "first_k_dense_replace"),
        ("Qwen2ForCausalLM", "max_window_layers"),
    ],
)
def test_counts_that_are_none_are_named(name: str, key: str, wrong: Any) -> None:
    """Some ended in a TypeError of Python's, others in layers that nobody meant."""
    config = {**BASE, "architectures": [name], "use_sliding_window": name.startswith("Qwen")}
    config |= {"mask_token_id": mask_of(name), "sliding_window": 8, "moe_intermediate_size": 32}
    config[key] = wrong
    kind = REGISTRY.find(config)
    with pytest.raises(InvalidRequest, match=f"{key} must be a") as caught:
        kind.shared_axes(kind.read_traits(config, {}), config)
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("name", "key", "wrong"),
    [
        ("BailingMoeV2ForCausalLM", "routed_scaling_factor", None),
        ("BailingMoeV2ForCausalLM", "routed_scaling_factor", "2.5"),
        ("BailingMoeV2ForCausalLM", "routed_scaling_factor", float("nan")),
        ("BailingMoeV2ForCausalLM", "routed_scaling_factor", 0),
        ("BailingMoeV2ForCausalLM", "rotary_dim", "4"),
        ("LLaDA2MoeModelLM", "routed_scaling_factor", None),
        ("LLaDAMoEModelLM", "moe_layer_freq", 1),
        ("Qwen2ForCausalLM", "layer_types", 3),
        ("Qwen2ForCausalLM", "layer_types", [[], [], [], []]),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", 3),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", ["1"]),
        ("Qwen3MoeForCausalLM", "layer_types", 3),
        ("LlamaForCausalLM", "head_dim", 15),
        ("BailingMoeV2ForCausalLM", "head_dim", 15),
    ],
)
def test_values_that_nothing_can_be_made_of_are_named(name: str, key: str, wrong: Any) -> None:
    """They ended in a TypeError of Python, in NaN, in other layers, or with another key blamed."""
    sizes = ("moe_intermediate_size", "expert_intermediate_size")
    experts = {"num_experts": 16, "num_experts_per_tok": 2, **dict.fromkeys(sizes, 32)}
    windows = {"use_sliding_window": True, "sliding_window": 8} if key == "layer_types" else {}
    told = {"mask_token_id": 3} if mask_of(name) else {}
    config = {**BASE, **experts, **windows, **told, "architectures": [name], key: wrong}
    if name.startswith(("Llama", "Qwen2")):
        del config["num_experts"]
    with pytest.raises((InvalidRequest, Unsupported), match=key) as refused:
        read_whole(config)
    assert refused.value.param == key


@pytest.mark.parametrize("wrong", [3, [3], [None]], ids=str)
def test_architectures_without_names_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a list of names"):
        REGISTRY.find({**BASE, "architectures": wrong})
