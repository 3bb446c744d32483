"""Ling 2.0 equals LLaDA2's published formulas, written out beside its test, under a causal mask."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.models.base import REGISTRY, ModelTraits
from tests.models.checkpoints import load
from tests.models.paged import PagedRunner, PageTable, causal
from tests.models.test_llada2_moe import CONFIG as LLADA2
from tests.models.test_llada2_moe import OTHER, Reference, worst
from tidemill.bench.shapes import SHAPES
from tidemill.runtime.errors import InvalidRequest, Unsupported

TOLERANCE = 1e-4
OF_BLOCKS = ("block_size", "mask_token_id")
LING: dict[str, Any] = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe"}
CONFIG = {key: value for key, value in LLADA2.items() if key not in OF_BLOCKS} | LING


def checkpoint(folder: Path, seed: int, *, saved: dict[str, Any], **changes: Any) -> Reference:
    """`changes` are what the weights are of, `saved` what config.json says beyond them."""
    reference = Reference(seed, **LING, **changes)
    computed = reference.config
    reference.config = {key: computed[key] for key in computed if key not in OF_BLOCKS} | saved
    reference.save(folder)
    reference.config = computed
    return reference


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        OTHER,
        {"first_k_dense_replace": 2, "num_shared_experts": 1},
        {"first_k_dense_replace": 0, "num_shared_experts": 0},
        {"n_group": 2, "topk_group": 1, "partial_rotary_factor": 0.25},
        {"num_experts_per_tok": 1, "n_group": 6, "topk_group": 1},
    ],
    ids=str,
)
def test_logits(changes: dict[str, Any], backend: str, tmp_path: Path, seed: int) -> None:
    """Whole, then in ragged chunks and token by token with another row in the same steps."""
    reference = checkpoint(tmp_path, seed, saved={}, **changes)
    rows = [torch.randint(0, 90, (28,)), torch.randint(0, 90, (16,))]
    wants = [reference.logits(row, block=1) for row in rows]
    runner = PagedRunner(load(tmp_path), backend, PageTable(2, 32, page_size=4, seed=seed))
    (got,) = runner.logits(rows, [causal(0, 0, 28)])
    assert worst(got, wants[0]) < TOLERANCE
    runner = PagedRunner(load(tmp_path), backend, PageTable(2, 32, page_size=4, seed=seed))
    for first, second in [
        ((0, 13), (0, 3)),
        ((13, 14), (3, 16)),
        ((14, 15), None),
        ((15, 28), None),
    ]:
        spans = [causal(0, *first), *([causal(1, *second)] if second else [])]
        for span, got in zip(spans, runner.logits(rows, spans), strict=True):
            assert worst(got, wants[span.row][span.start : span.stop]) < TOLERANCE, span


@pytest.mark.parametrize(
    "saved",
    [
        {"n_group": 2},
        {"topk_group": 4},
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
        {"partial_rotary_factor": 1.0},
        {"rope_theta": 1000.0},
        {"num_experts_per_tok": 2},
    ],
    ids=lambda saved: next(iter(saved)),
)
def test_a_wrong_trait_shows(saved: dict[str, Any], tmp_path: Path, seed: int) -> None:
    """Negative control: the same weights under another config.json give other logits."""
    want = checkpoint(tmp_path, seed, saved=saved)
    ids = torch.randint(0, 90, (24,))
    runner = PagedRunner(load(tmp_path), "sdpa", PageTable(1, 24, page_size=4, seed=seed))
    (got,) = runner.logits([ids], [causal(0, 0, 24)])
    assert worst(got, want.logits(ids, block=1)) > 5 * TOLERANCE


def test_a_mask_of_blocks_shows(tmp_path: Path, seed: int) -> None:
    """Negative control: under LLaDA2's mask the same weights give other logits."""
    reference = checkpoint(tmp_path, seed, saved={})
    ids = torch.randint(0, 90, (24,))
    runner = PagedRunner(load(tmp_path), "sdpa", PageTable(1, 24, page_size=4, seed=seed))
    (got,) = runner.logits([ids], [causal(0, 0, 24)])
    assert worst(got, reference.logits(ids, block=4)) > 5 * TOLERANCE


def read(**changes: Any) -> ModelTraits:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}
    return REGISTRY.find(config).read_traits(config, {})


def test_traits() -> None:
    traits = read()
    assert (traits.mask_block, traits.mask_token_id, traits.logits_shift) == (1, None, 1)
    assert (traits.default_method, traits.methods) == ("autoregressive", ("autoregressive",))
    assert not traits.routes_by_block
    assert traits.rope is not None
    assert traits.rope.rotary_dim == 8


def test_published_shape() -> None:
    config = SHAPES["ling-mini"]
    kind = REGISTRY.find(config)
    traits, options = kind.read_traits(config, {}), kind.options(config)  # type: ignore[attr-defined]
    assert traits.rope is not None
    assert (traits.num_layers, traits.head_dim, traits.rope.rotary_dim) == (20, 128, 64)
    assert (traits.eos_token_ids, traits.max_model_len) == ((156892,), 32768)
    assert list(options.mixtures) == list(range(1, 20))
    mixture = options.mixtures[1]
    assert (mixture.inner_size, mixture.shared_size) == (512, 512)
    router = mixture.router
    assert (router.num_experts, router.per_token, router.biased) == (256, 8, True)
    assert (router.num_groups, router.kept_groups, router.scale) == (8, 4, 2.5)


def test_absent_keys_are_those_of_the_published_class() -> None:
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    config = LING | {key: SHAPES["ling-mini"][key] for key in kept}
    kind = REGISTRY.find(config)
    traits = kind.read_traits(config, {})
    published = kind.read_traits(SHAPES["ling-mini"], {})
    assert traits.rope is not None
    assert traits.rope.rotary_dim == traits.head_dim == 128
    for same in ("intermediate_size", "num_kv_heads", "norm_eps", "eos_token_ids", "max_model_len"):
        assert getattr(traits, same) == getattr(published, same), same
    router = kind.options(config).mixtures[1].router  # type: ignore[attr-defined]
    assert (router.num_experts, router.renormalised, router.scale) == (256, True, 1.0)


def test_how_much_of_a_head_turns_in_two_spellings() -> None:
    for same in ({"partial_rotary_factor": "absent"}, {"partial_rotary_factor": 0.25}):
        traits = read(**same, rotary_dim=4)
        assert traits.rope is not None
        assert traits.rope.rotary_dim == 4
    with pytest.raises(Unsupported, match="rotary_dim = 16") as caught:
        read(partial_rotary_factor=0.5, rotary_dim=16)
    assert caught.value.param == "rotary_dim"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("score_function", "softmax"),
        ("use_sliding_window", True),
        ("use_rmsnorm", False),
        ("norm_head", True),
        ("norm_softmax", True),
        ("router_dtype", "bf16"),
        ("num_nextn_predict_layers", 1),
        ("is_causal", False),
        ("block_length", 32),
        ("block_size", 4),
        ("expert_capacity", 4),
    ],
)
def test_variants_are_refused(key: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=key) as caught:
        read(**{key: value})
    assert caught.value.param == key


def test_keys_of_training_are_not_refused() -> None:
    training = {
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "output_dropout": 0.0,
        "mtp_loss_scaling_factor": 0,
        "num_nextn_predict_layers": 0,
        "output_router_logits": False,
        "max_window_layers": 20,
        "using_split_qkv_in_lora": False,
        "use_cache": True,
    }
    assert read(**training) == read()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 5}, "n_group"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "n_group"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok"),
        ({"moe_shared_expert_intermediate_size": 20}, "moe_shared_expert_intermediate_size"),
    ],
)
def test_impossible_experts_are_named(changes: dict[str, Any], named: str) -> None:
    config = CONFIG | changes
    kind = REGISTRY.find(config)
    with pytest.raises((InvalidRequest, Unsupported), match=named):
        kind.options(config)  # type: ignore[attr-defined]
