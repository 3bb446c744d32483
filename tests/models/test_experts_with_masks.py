"""Diffusion models with experts equal the published autoregressive classes that have their weights,
under the masks they are trained with.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine_service.core.step import FULL
from engine_service.models.base import REGISTRY, CausalModel
from tests.models.checkpoints import FEW_EXPERTS, Case, load, write
from tests.models.paged import PagedRunner, PageTable, causal
from tidemill.runtime.errors import InvalidRequest, Unsupported

MASK = 319
TOLERANCE = 1e-4


def as_sdar_moe(config: dict[str, Any]) -> None:
    config["architectures"] = ["SDARMoeForCausalLM"]
    config["model_type"] = "sdar_moe"
    config["num_experts"] = config.pop("num_local_experts")
    config |= {"block_size": 4, "mask_token_id": MASK}


def as_llada_moe(config: dict[str, Any]) -> None:
    """Of Qwen3-MoE, whose heads are normed alike, without renormalised shares."""
    config["architectures"] = ["LLaDAMoEModelLM"]
    config["model_type"] = "lladamoe"
    config["num_experts"] = config.pop("num_local_experts")
    config["dense_intermediate_size"] = config.pop("intermediate_size")
    config["expert_intermediate_size"] = config.pop("moe_intermediate_size")
    config |= {
        "moe_layer_freq": [0, 1, 1],
        "qk_layernorm": True,
        "mask_token_id": MASK,
        "norm_topk_prob": None,
        "partial_rotary_factor": 1,
        "routed_scaling_factor": 1.0,
        "moe_router_score_function": "softmax",
    }


SDAR = Case(
    name="sdar-moe",
    kind="Qwen3Moe",
    options=FEW_EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
    edit=as_sdar_moe,
)
LLADA = Case(
    name="llada-moe",
    kind="Qwen3Moe",
    options=FEW_EXPERTS | {"mlp_only_layers": [0]},
    edit=as_llada_moe,
)
MODELS = [(SDAR, 4), (LLADA, FULL)]


def build(case: Case, folder: Path, seed: int) -> tuple[transformers.PreTrainedModel, CausalModel]:
    return write(case, folder, seed), load(folder)


def dense(theirs: transformers.PreTrainedModel, ids: torch.Tensor, block: int) -> torch.Tensor:
    """[L, V] with every position seeing all blocks before its own and its own."""
    of_block = torch.arange(len(ids)) // block
    seen = of_block[:, None] >= of_block[None, :]
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    with torch.inference_mode():
        return theirs(ids[None], attention_mask=mask[None, None]).logits[0]


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(("case", "block"), MODELS, ids=lambda value: getattr(value, "name", ""))
def test_logits_of_rows_that_share_a_step(
    case: Case, block: int, tmp_path: Path, seed: int
) -> None:
    theirs, ours = build(case, tmp_path, seed)
    rows = [torch.randint(0, 320, (length,)) for length in (24, 8, 32)]
    runner = PagedRunner(ours, "sdpa", PageTable(3, 32, 4, seed))
    spans = [causal(index, 0, len(row), block) for index, row in enumerate(rows)]
    for got, row in zip(runner.logits(rows, spans), rows, strict=True):
        assert worst(got, dense(theirs, row, block)) < TOLERANCE
        assert worst(got, dense(theirs, row, 1)) > 5 * TOLERANCE, "negative control: causal"


def test_blocks_after_cached_ones(tmp_path: Path, seed: int) -> None:
    theirs, ours = build(SDAR, tmp_path, seed)
    row = torch.randint(0, MASK, (20,))
    runner = PagedRunner(ours, "sdpa", PageTable(1, 20, 4, seed))
    for start, stop in ((0, 8), (8, 12), (12, 20)):
        (got,) = runner.logits([row], [causal(0, start, stop, 4)])
        assert worst(got, dense(theirs, row[:stop], 4)[start:]) < TOLERANCE


def test_traits(tmp_path: Path, seed: int) -> None:
    for case, block, method in ((SDAR, 4, "block_diffusion"), (LLADA, FULL, "full_canvas")):
        traits = build(case, tmp_path / case.name, seed)[1].traits
        assert (traits.mask_block, traits.mask_token_id, traits.logits_shift) == (block, MASK, 0)
        assert (traits.default_method, traits.methods) == (method, (method,))


CONFIG = {
    "architectures": ["LLaDAMoEModelLM"],
    "hidden_size": 64,
    "dense_intermediate_size": 96,
    "expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 157184,
    "max_position_embeddings": 64,
}


def test_the_published_mask_token() -> None:
    kind = REGISTRY.find(CONFIG)
    assert kind.read_traits(CONFIG, {}).mask_token_id == 156895
    assert kind.read_traits(CONFIG, {"<|mask|>": 7}).mask_token_id == 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_qkv", 8.0),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_score_function", "sigmoid"),
        ("norm_topk_prob", True),
        ("routed_scaling_factor", 2.5),
        ("shared_expert_intermediate_size", 64),
    ],
)
def test_variants_are_refused(key: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=key) as caught:
        REGISTRY.find(CONFIG).read_traits(CONFIG | {key: value}, {})
    assert caught.value.param == key


def test_an_entry_for_every_layer() -> None:
    config = CONFIG | {"moe_layer_freq": [1]}
    with pytest.raises(InvalidRequest, match="1 entries for 2 layers"):
        REGISTRY.find(config).options(config)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_other_architectures_refuse_experts(key: str) -> None:
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "num_experts": None, key: 8}
    with pytest.raises(Unsupported, match=key):
        REGISTRY.find(config).read_traits(config, {})
