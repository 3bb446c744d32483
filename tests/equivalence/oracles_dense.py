"""Models for the restated loops to run over: plain torch, dense attention, no pages.

Positions see each other and a past that is handed in, whatever computed it; so stale keys and
values are simply an older past.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from tests.equivalence.oracles import Logits, Past
from tests.fakes import ToyModel

Pair = tuple[torch.Tensor, torch.Tensor]


def attention(q_QHD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor) -> torch.Tensor:
    """[Q, H * D]: softmax(q k / sqrt(D)) v, every query seeing every key; G divides H."""
    group = q_QHD.shape[1] // k_SGD.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k_SGD, v_SGD))
    scores = torch.einsum("qhd,shd->hqs", q_QHD, k) / math.sqrt(q_QHD.shape[2])
    return torch.einsum("hqs,shd->qhd", scores.softmax(-1), v).flatten(1)


def joined(past: Past, layer: int, own: Pair) -> Pair:
    """Keys and values of one layer, those of the past first."""
    if not past:
        return own
    keys, values = past[layer]
    return torch.cat([keys, own[0]]), torch.cat([values, own[1]])


class DenseToy:
    """The weights of a ToyModel; float64."""

    def __init__(self, toy: ToyModel) -> None:
        self._toy = toy

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[1, L, V] with every position seeing all."""
        return self.cached(token_ids, torch.arange(token_ids.shape[1]), [])[0]

    def block_logits(self, block: int) -> Logits:
        """Logits of the same weights under a block-causal mask: a block sees those before it."""

        def logits(token_ids: torch.Tensor) -> torch.Tensor:
            pieces, past = [], []
            for start in range(0, token_ids.shape[1], block):
                ids = token_ids[:, start : start + block]
                piece, own = self.cached(ids, start + torch.arange(ids.shape[1]), past)
                past = [joined(past, layer, pair) for layer, pair in enumerate(own)]
                pieces.append(piece)
            return torch.cat(pieces, dim=1)

        return logits

    def cached(
        self, token_ids: torch.Tensor, positions: torch.Tensor, past: Past
    ) -> tuple[torch.Tensor, Past]:
        """([1, Q, V], own keys and values [Q, H, D] per layer)."""
        toy, heads = self._toy, self._toy.heads
        rates = torch.exp(-5 * torch.arange(0, toy.width, 2, dtype=torch.float64) / toy.width)
        angles = positions[:, None] * rates
        x = toy.embedding[token_ids[0]] + torch.cat([angles.sin(), angles.cos()], -1)
        computed: Past = []
        for index, layer in enumerate(toy.layers):
            n = functional.normalize(x, dim=-1) * math.sqrt(toy.width)
            q, k, v = ((n @ layer[name].T).unflatten(-1, (heads, -1)) for name in "qkv")
            computed.append((k, v))
            x = x + attention(q, *joined(past, index, (k, v))) @ layer["o"].T
            n = functional.normalize(x, dim=-1) * math.sqrt(toy.width)
            x = x + torch.relu(n @ layer["up"].T) @ layer["down"].T
        return (x @ toy.head.T)[None], computed


class DenseLLaDA:
    """A LLaDA checkpoint, by its own tensor names and config keys; float32."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        self._tensors, self._config = tensors, config

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[1, L, V] with every position seeing all."""
        return self.cached(token_ids, torch.arange(token_ids.shape[1]), [])[0]

    def cached(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        past: Past,
        queries: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, Past]:
        """([1, Q, V], own rotated keys and values [Q, G, D] per layer).

        Rotated queries [Q, H, D] are appended to `queries`, layer by layer.
        """
        config = self._config
        x = self._tensors["model.transformer.wte.weight"][token_ids[0]]
        head_dim = config["d_model"] // config["n_heads"]
        computed: Past = []
        for index in range(config["n_layers"]):
            block = f"blocks.{index}"
            n = self._norm(x, f"{block}.attn_norm")
            q, k, v = (
                self._linear(n, f"{block}.{name}_proj").unflatten(-1, (-1, head_dim))
                for name in "qkv"
            )
            q, k = self._rotated(q, positions), self._rotated(k, positions)
            computed.append((k, v))
            if queries is not None:
                queries.append(q)
            mixed = attention(q, *joined(past, index, (k, v)))
            x = x + self._linear(mixed, f"{block}.attn_out")
            n = self._norm(x, f"{block}.ff_norm")
            gate, up = (self._linear(n, f"{block}.{name}_proj") for name in ("ff", "up"))
            x = x + self._linear(functional.silu(gate) * up, f"{block}.ff_out")
        head = "wte" if config["weight_tying"] else "ff_out"
        return self._linear(self._norm(x, "ln_f"), head)[None], computed

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._tensors[f"model.transformer.{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt()
        return x * scale * self._tensors[f"model.transformer.{name}.weight"]

    def _rotated(self, x_QHD: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Feature i and feature i + D / 2 turn by position * theta ** (-2 i / D)."""
        half = x_QHD.shape[-1] // 2
        rates = self._config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (positions[:, None] * rates)[:, None]
        first, second = x_QHD[..., :half], x_QHD[..., half:]
        turned = (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
        return torch.cat(turned, -1)


class DenseQwen2(DenseLLaDA):
    """A Qwen2 (and so a Dream) checkpoint by transformers' names: LLaDA's block, with biases."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        named = {_llada_name(name): tensor for name, tensor in tensors.items()}
        own = {
            "d_model": config["hidden_size"],
            "n_heads": config["num_attention_heads"],
            "n_layers": config["num_hidden_layers"],
            "rope_theta": config["rope_parameters"]["rope_theta"],
            "rms_norm_eps": config["rms_norm_eps"],
            "weight_tying": config["tie_word_embeddings"],
        }
        super().__init__(named, own)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self._tensors.get(f"model.transformer.{name}.bias")
        return super()._linear(x, name) + (0 if bias is None else bias)


def _llada_name(name: str) -> str:
    """Of a tensor that transformers calls `name`."""
    for theirs, ours in (
        ("model.layers.", "blocks."),
        ("lm_head", "ff_out"),
        ("model.embed_tokens", "wte"),
        ("model.norm", "ln_f"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ff_norm"),
        ("self_attn.o_proj", "attn_out"),
        ("self_attn.", ""),
        ("mlp.gate_proj", "ff_proj"),
        ("mlp.up_proj", "up_proj"),
        ("mlp.down_proj", "ff_out"),
    ):
        name = name.replace(theirs, ours)
    return f"model.transformer.{name}"
