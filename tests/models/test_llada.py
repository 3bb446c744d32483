"""LLaDA's own tensor names and config keys become logits that equal a dense restatement."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_service.core.step import FULL, Span
from engine_service.models.base import REGISTRY, CausalModel, ModelTraits
from tests.equivalence.oracles import select
from tests.equivalence.oracles_dense import DenseLLaDA
from tests.models.checkpoints import load
from tests.models.paged import PagedRunner, PageTable, causal
from tidemill.runtime.errors import InvalidRequest, Unsupported

MASK = 251
TOLERANCE = 1e-4
CONFIG: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 64,
    "embedding_size": 256,
    "eos_token_id": 250,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": MASK,
    "max_sequence_length": 128,
    "mlp_hidden_size": 96,
    "mlp_ratio": 4,
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 3,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 256,
    "weight_tying": False,
}
"""The keys of the published 8B, with small sizes."""

VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "grouped": {"n_kv_heads": 2},
    "tied": {"weight_tying": True},
    "ratio": {"mlp_hidden_size": None, "mlp_ratio": 2},
    "padded": {"vocab_size": 250, "embedding_size": 256},
    "all-heads": {"n_kv_heads": None, "embedding_size": None},
}


def tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights under the published names; greedy choices are clear, positions matter."""
    generator = torch.Generator().manual_seed(seed)
    width = config["d_model"]
    narrow = width // config["n_heads"] * (config["n_kv_heads"] or config["n_heads"])
    inner = config["mlp_hidden_size"] or config["mlp_ratio"] * width
    vocab = config["embedding_size"] or config["vocab_size"]
    per_block = {
        "attn_norm": (width,),
        "ff_norm": (width,),
        "q_proj": (width, width),
        "k_proj": (narrow, width),
        "v_proj": (narrow, width),
        "attn_out": (width, width),
        "ff_proj": (inner, width),
        "up_proj": (inner, width),
        "ff_out": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocab, width), "ln_f": (width,)}
    if not config["weight_tying"]:
        shapes["ff_out"] = (vocab, width)
    for layer in range(config["n_layers"]):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in per_block.items()}
    return {
        f"model.transformer.{name}.weight": (
            1 + 0.3 * torch.randn(shape, generator=generator)
            if len(shape) == 1
            else 0.4 * torch.randn(shape, generator=generator)
        )
        for name, shape in shapes.items()
    }


def build(folder: Path, seed: int, **changes: Any) -> tuple[DenseLLaDA, CausalModel]:
    config = CONFIG | changes
    weights = tensors(config, seed)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return DenseLLaDA(weights, config), load(folder)


def traits(added: dict[str, int] | None = None, **changes: Any) -> ModelTraits:
    config = CONFIG | changes
    config = {key: value for key, value in config.items() if value != "absent"}
    return REGISTRY.find(config).read_traits(config, added or {})


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(variant: str, backend: str, tmp_path: Path, seed: int) -> None:
    dense, ours = build(tmp_path, seed, **VARIANTS[variant])
    rows = [torch.randint(0, 250, (length,)) for length in (19, 8, 1)]
    runner = PagedRunner(ours, backend, PageTable(3, 19, 4, seed))
    spans = [causal(index, 0, len(row), FULL) for index, row in enumerate(rows)]
    for got, row in zip(runner.logits(rows, spans), rows, strict=True):
        assert worst(got, dense.logits(row[None])[0]) < TOLERANCE


def test_a_span_inside_a_stored_canvas(tmp_path: Path, seed: int) -> None:
    """A block computed anew between positions that keep older keys and values (dual cache)."""
    dense, ours = build(tmp_path, seed)
    row = torch.randint(0, 250, (20,))
    row[8:] = MASK
    runner = PagedRunner(ours, "sdpa", PageTable(1, 20, 4, seed))
    runner.logits([row], [causal(0, 0, 20, FULL)])
    _, everything = dense.cached(row[None], torch.arange(20), [])
    past = select(everything, [*range(8), *range(14, 20)])
    for _ in range(3):
        row[8:14] = torch.randint(0, 250, (6,))
        (got,) = runner.logits([row], [Span(0, 8, 14, 20, FULL, 8, 14)])
        want = dense.cached(row[None, 8:14], torch.arange(8, 14), past)[0][0]
        assert worst(got, want) < TOLERANCE
    # Negative control: the older keys and values are not those of a full forward.
    assert worst(got, dense.logits(row[None])[0, 8:14]) > 5 * TOLERANCE


@pytest.mark.parametrize("mask_block", [1, 4, 16])
def test_a_narrower_mask_shows(mask_block: int, tmp_path: Path, seed: int) -> None:
    """Negative control."""
    dense, ours = build(tmp_path, seed)
    row = torch.randint(0, 250, (19,))
    runner = PagedRunner(ours, "sdpa", PageTable(1, 19, 4, seed))
    (got,) = runner.logits([row], [causal(0, 0, 19, mask_block)])
    assert worst(got, dense.logits(row[None])[0]) > 5 * TOLERANCE


def test_a_tied_checkpoint_may_hold_its_head_too(tmp_path: Path, seed: int) -> None:
    config = CONFIG | {"weight_tying": True}
    weights = tensors(config, seed)
    copy = weights["model.transformer.wte.weight"].clone()
    save_file(weights | {"model.transformer.ff_out.weight": copy}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).traits.tie_embeddings


def test_missing_and_unknown_tensors_go_by_their_published_names(tmp_path: Path, seed: int) -> None:
    weights = tensors(CONFIG, seed)
    weights["model.transformer.blocks.1.gate.weight"] = weights.pop(
        "model.transformer.blocks.1.ff_proj.weight"
    )
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InvalidRequest, match=r"model\.transformer\.blocks\.1\.ff_proj\.weight"):
        load(tmp_path)


def test_traits_of_the_published_checkpoint() -> None:
    got = traits(d_model=4096, n_heads=32, n_kv_heads=32, embedding_size=126464, vocab_size=126464)
    assert (got.hidden_size, got.num_layers, got.num_heads, got.num_kv_heads) == (4096, 3, 32, 32)
    assert (got.head_dim, got.intermediate_size, got.vocab_size) == (128, 96, 126464)
    assert (got.norm_eps, got.rope.theta, got.max_model_len) == (1e-5, 500000.0, 128)
    assert (got.tie_embeddings, got.eos_token_ids, got.windows) == (False, (250,), (None,) * 3)
    assert got.eot_token_ids == (), "another mask token, so another vocabulary"
    published = {"mask_token_id": 126336, "embedding_size": 126464, "vocab_size": 126464}
    assert traits(**published).eot_token_ids == (126348,)
    assert traits(**published | {"embedding_size": 126348}).eot_token_ids == ()
    assert (got.mask_block, got.logits_shift) == (FULL, 0)
    assert (got.default_method, got.methods) == ("full_canvas", ("full_canvas",))


@pytest.mark.parametrize(
    ("changes", "added", "mask"),
    [
        ({"mask_token_id": 5}, {}, 5),
        ({"mask_token_id": "absent"}, {"<|mdm_mask|>": 7}, 7),
        ({"mask_token_id": "absent"}, {"<|MASK|>": 8}, 8),
        ({"mask_token_id": None, "embedding_size": 126464}, {}, 126336),
    ],
)
def test_mask_token(changes: dict[str, Any], added: dict[str, int], mask: int) -> None:
    assert traits(added, **changes).mask_token_id == mask


def test_no_mask_token_in_a_small_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"126336.*vocabulary size 256"):
        traits(mask_token_id="absent")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_norm_type": "default"},
        {"layer_norm_type": "gemma_rms"},
        {"activation_type": "swiglu"},
        {"block_type": "sequential"},
        {"alibi": True},
        {"rope": False},
        {"include_bias": True},
        {"include_qkv_bias": True},
        {"bias_for_layer_norm": True},
        {"attention_layer_norm": True},
        {"input_emb_norm": True},
        {"scale_logits": True},
        {"multi_query_attention": True},
        {"block_group_size": 2},
        {"quantization_config": {"quant_method": "awq"}},
    ],
    ids=lambda changes: "-".join(map(str, next(iter(changes.items())))),
)
def test_variants_are_refused_by_name(changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(Unsupported, match=f"{key} = .*not supported") as caught:
        traits(**changes)
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("key", "value"), [("d_model", "absent"), ("n_layers", 0), ("n_kv_heads", "4")]
)
def test_sizes_are_named_as_the_checkpoint_names_them(key: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=key) as caught:
        traits(**{key: value})
    assert caught.value.param == key
