"""LLaDA2 equals its published formulas, written out here token by token and expert by expert."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from engine_service.models.base import REGISTRY
from tests.models.checkpoints import load
from tests.models.paged import PagedRunner, PageTable, causal
from tidemill.runtime.errors import InvalidRequest, Unsupported

TOLERANCE = 1e-4
CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 600.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "tie_word_embeddings": False,
    "block_size": 4,
    "mask_token_id": 89,
    "eos_token_id": None,
}
OTHER = {
    "use_qkv_bias": True,
    "use_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 1.0,
    "num_shared_experts": 0,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "moe_router_enable_expert_bias": False,
}
"""The other value of every switch."""


class Reference:
    """A checkpoint with random weights under their published names, and what it computes."""

    def __init__(self, seed: int, **changes: Any) -> None:
        torch.manual_seed(seed)
        self.config = config = CONFIG | changes
        self.weights: dict[str, torch.Tensor] = {}
        width, head = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.matrix("model.word_embeddings", config["vocab_size"], width)
        self.matrix("lm_head", config["vocab_size"], width)
        self.norm("model.norm", width)
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            self.norm(f"{name}.input_layernorm", width)
            self.norm(f"{name}.post_attention_layernorm", width)
            own = f"{name}.attention"
            fused = (heads + 2 * kv_heads) * head
            self.matrix(f"{own}.query_key_value", fused, width, bias=config["use_qkv_bias"])
            self.matrix(f"{own}.dense", width, heads * head, bias=config["use_bias"])
            if config["use_qk_norm"]:
                self.norm(f"{own}.query_layernorm", head)
                self.norm(f"{own}.key_layernorm", head)
            if layer < config["first_k_dense_replace"]:
                self.gated(f"{name}.mlp", config["intermediate_size"])
                continue
            self.matrix(f"{name}.mlp.gate", config["num_experts"], width)
            if config["moe_router_enable_expert_bias"]:
                self.weights[f"{name}.mlp.gate.expert_bias"] = torch.randn(config["num_experts"])
            inner = config["moe_intermediate_size"]
            for expert in range(config["num_experts"]):
                self.gated(f"{name}.mlp.experts.{expert}", inner)
            if config["num_shared_experts"]:
                self.gated(f"{name}.mlp.shared_experts", inner * config["num_shared_experts"])

    def matrix(self, name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        self.weights[f"{name}.weight"] = torch.randn(rows, columns) * 0.4
        if bias:
            self.weights[f"{name}.bias"] = torch.randn(rows) * 0.5

    def norm(self, name: str, width: int) -> None:
        self.weights[f"{name}.weight"] = torch.randn(width) * 0.3 + 1

    def gated(self, name: str, inner: int) -> None:
        for part, sizes in {"gate": (inner, 0), "up": (inner, 0), "down": (0, inner)}.items():
            rows, columns = (size or self.config["hidden_size"] for size in sizes)
            self.matrix(f"{name}.{part}_proj", rows, columns)

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors")

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def feed_forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (self.linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.linear(gate * gate.sigmoid() * up, f"{name}.down_proj")

    def rotated(self, x_LHD: torch.Tensor) -> torch.Tensor:
        """The first features of every head, in halves; the rest is passed through."""
        dim = int(self.config["head_dim"] * self.config["partial_rotary_factor"])
        turned, rest = x_LHD[..., :dim], x_LHD[..., dim:]
        frequencies = self.config["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        angles = (torch.arange(len(x_LHD))[:, None] * frequencies)[:, None]
        first, second = turned.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def attention(self, x: torch.Tensor, name: str, block: int) -> torch.Tensor:
        heads, kv_heads = (self.config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        qkv = self.linear(x, f"{name}.query_key_value").unflatten(1, (heads + 2 * kv_heads, -1))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if self.config["use_qk_norm"]:
            q = self.normed(q, f"{name}.query_layernorm")
            k = self.normed(k, f"{name}.key_layernorm")
        q, k = self.rotated(q), self.rotated(k)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.config["head_dim"] ** 0.5
        of_block = torch.arange(len(x)) // block
        scores = scores.masked_fill(of_block[:, None] < of_block[None, :], float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.linear(mixed.flatten(1), f"{name}.dense")

    def experts(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """One token at a time, groups and experts ranked in plain Python."""
        config = self.config
        bias = self.weights.get(f"{name}.gate.expert_bias", torch.zeros(config["num_experts"]))
        size = config["num_experts"] // config["n_group"]
        choices = iter(self.chosen_by_blocks(x, name, bias))
        out = []
        for token in x:
            scores = self.linear(token, f"{name}.gate").sigmoid()
            ranked = (scores + bias).tolist()
            if config.get("expert_capacity"):
                out.append(self.mixed(token, name, scores, next(choices)))
                continue
            groups = [ranked[start : start + size] for start in range(0, len(ranked), size)]
            strength = [sum(sorted(group)[-2:]) for group in groups]
            best = sorted(range(len(groups)), key=strength.__getitem__)[-config["topk_group"] :]
            allowed = [expert for expert in range(len(ranked)) if expert // size in best]
            chosen = sorted(allowed, key=ranked.__getitem__)[-config["num_experts_per_tok"] :]
            out.append(self.mixed(token, name, scores, chosen))
        mixed = torch.stack(out)
        if config["num_shared_experts"]:
            mixed = mixed + self.feed_forward(x, f"{name}.shared_experts")
        return mixed

    def mixed(
        self, token: torch.Tensor, name: str, scores: torch.Tensor, chosen: list[int]
    ) -> torch.Tensor:
        shares = scores[chosen]
        if self.config["norm_topk_prob"] and len(chosen) > 1:
            shares = shares / shares.sum()
        parts = [self.feed_forward(token, f"{name}.experts.{expert}") for expert in chosen]
        return torch.stack(parts).T @ (shares * self.config["routed_scaling_factor"])

    def chosen_by_blocks(
        self, x: torch.Tensor, name: str, bias: torch.Tensor
    ) -> Iterator[list[int]]:
        """LLaDA2.2: experts of every token, out of those that are the best of somebody's block."""
        config, block = self.config, self.config["block_size"]
        for start in range(0, len(x), block):
            ranked = (
                self.linear(x[start : start + block], f"{name}.gate").sigmoid() + bias
            ).tolist()
            best = [max(column) for column in zip(*ranked, strict=True)]
            pool = sorted(range(len(best)), key=best.__getitem__)[-config["expert_capacity"] :]
            for row in ranked:
                yield sorted(pool, key=row.__getitem__)[-config["num_experts_per_tok"] :]

    def logits(self, ids: torch.Tensor, block: int | None = None) -> torch.Tensor:
        """[L, V] with every position seeing all blocks before its own and its own."""
        x = self.weights["model.word_embeddings.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            own = self.normed(x, f"{name}.input_layernorm")
            x = x + self.attention(own, f"{name}.attention", block or self.config["block_size"])
            own = self.normed(x, f"{name}.post_attention_layernorm")
            dense = layer < self.config["first_k_dense_replace"]
            x = x + (self.feed_forward if dense else self.experts)(own, f"{name}.mlp")
        return self.linear(self.normed(x, "model.norm"), "lm_head")


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        OTHER,
        {"partial_rotary_factor": 0.25},
        {"expert_capacity": 5},
        {**OTHER, "expert_capacity": 4, "num_experts_per_tok": 4},
    ],
    ids=str,
)
def test_logits(changes: dict[str, Any], backend: str, tmp_path: Path, seed: int) -> None:
    """Whole, then in chunks of blocks with another row in the same steps."""
    reference = Reference(seed, **changes)
    reference.save(tmp_path)
    model = load(tmp_path)
    rows = [torch.randint(0, 90, (28,)), torch.randint(0, 90, (16,))]
    wants = [reference.logits(row) for row in rows]
    runner = PagedRunner(model, backend, PageTable(2, 32, page_size=4, seed=seed))
    (got,) = runner.logits(rows, [causal(0, 0, 28, 4)])
    assert worst(got, wants[0]) < TOLERANCE
    runner = PagedRunner(model, backend, PageTable(2, 32, page_size=4, seed=seed))
    for first, second in [((0, 12), (0, 4)), ((12, 16), (4, 16)), ((16, 28), None)]:
        spans = [causal(0, *first, 4), *([causal(1, *second, 4)] if second else [])]
        for span, got in zip(spans, runner.logits(rows, spans), strict=True):
            assert worst(got, wants[span.row][span.start : span.stop]) < TOLERANCE, span


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 1.0},
        {"topk_group": 4},
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
        {"rope_theta": 1000.0},
        {"num_experts_per_tok": 2},
        {"expert_capacity": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_wrong_trait_shows(changes: dict[str, Any], tmp_path: Path, seed: int) -> None:
    """Negative control: the same weights under another config.json give other logits."""
    reference = Reference(seed)
    ids = torch.randint(0, 90, (24,))
    want = reference.logits(ids)
    reference.config = reference.config | changes
    reference.save(tmp_path)
    runner = PagedRunner(load(tmp_path), "sdpa", PageTable(1, 24, page_size=4, seed=seed))
    (got,) = runner.logits([ids], [causal(0, 0, 24, 4)])
    assert worst(got, want) > 5 * TOLERANCE


def test_traits(tmp_path: Path, seed: int) -> None:
    Reference(seed).save(tmp_path)
    traits = load(tmp_path).traits
    assert (traits.mask_block, traits.mask_token_id, traits.logits_shift) == (4, 89, 0)
    assert (traits.default_method, traits.methods) == ("block_diffusion", ("block_diffusion",))


def read(**changes: Any) -> Any:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}
    return REGISTRY.find(config).read_traits(config, {})


def test_published_defaults() -> None:
    absent = dict.fromkeys(("block_size", "mask_token_id", "eos_token_id"), "absent")
    traits = read(**absent, vocab_size=157184)
    assert (traits.mask_block, traits.mask_token_id, traits.eos_token_ids) == (
        32,
        156895,
        (156892,),
    )
    assert read(block_length=8).mask_block == 8
    assert read(architectures="absent").architecture == "LLaDA2MoeModelLM"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("score_function", "softmax"),
        ("use_sliding_window", True),
        ("norm_head", True),
    ],
)
def test_variants_are_refused(key: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=key) as caught:
        read(**{key: value})
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 5}, "n_group"),
        ({"n_group": 12, "topk_group": 6}, "n_group"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "n_group"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok"),
        ({"expert_capacity": 2}, "expert_capacity"),
        ({"expert_capacity": 13}, "expert_capacity"),
        ({"moe_shared_expert_intermediate_size": 20}, "moe_shared_expert_intermediate_size"),
    ],
)
def test_impossible_experts_are_named(changes: dict[str, Any], named: str) -> None:
    config = {**CONFIG, **changes}
    kind = REGISTRY.find(config)
    with pytest.raises((InvalidRequest, Unsupported), match=named):
        kind.options(config)
