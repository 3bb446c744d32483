"""A layer of the shared decoder: attention, then a feed-forward layer or experts, behind norms.

Grouped-query attention, SwiGLU, RMSNorm and rotary positions; biases, per-head norms, sliding
windows and the names of tensors are fields. It knows neither other layers nor what follows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine_service.attention.base import AttentionStep
from engine_service.distributed import Group
from engine_service.layers.ahead import Ahead
from engine_service.layers.attention import PagedAttention
from engine_service.layers.embedding import Embedding
from engine_service.layers.experts import Experts, Mixture
from engine_service.layers.feed_forward import FeedForward
from engine_service.layers.linear import Linear
from engine_service.layers.norm import HeadNorm, RMSNorm
from engine_service.layers.slots import Share, Slot, Slots
from engine_service.models.base import ModelTraits
from engine_service.schemes.base import LinearScheme

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What a checkpoint calls the parts of a decoder, those of a layer below the layer's name."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    attention: str = "self_attn"
    feed_forward: str = "mlp"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Three matrices, or one that holds the three in this order."""
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """Where the variants differ beyond their sizes."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation."""
    mixtures: Mapping[int, Mixture] = field(default_factory=dict)
    """Experts of a layer, by its index; the feed-forward of all other layers is dense."""
    names: TensorNames = TensorNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What every part of a decoder is made from."""

    traits: ModelTraits
    options: DecoderOptions
    scheme: LinearScheme
    device: torch.device
    dtype: torch.dtype
    group: Group

    @property
    def where(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype, "group": self.group}

    def linear(self, inputs: Share, parts: dict[str, tuple[Share, ...]], *, bias: bool) -> Linear:
        return Linear(inputs, parts, bias=bias, scheme=self.scheme, **self.where)

    def embedding(self) -> Embedding:
        return Embedding(self.traits.vocab_size, self.traits.hidden_size, **self.where)

    def norm(self) -> RMSNorm:
        traits = self.traits
        return RMSNorm(traits.hidden_size, traits.norm_eps, device=self.device, dtype=self.dtype)

    def feed_forward(self, layer: int) -> FeedForward | Experts:
        traits, mixture = self.traits, self.options.mixtures.get(layer)
        if mixture is not None:
            return Experts(
                traits.hidden_size,
                mixture,
                scheme=self.scheme,
                device=self.device,
                dtype=self.dtype,
                group=self.group,
            )
        return FeedForward(
            traits.hidden_size,
            traits.intermediate_size,
            bias=self.options.mlp_bias,
            scheme=self.scheme,
            device=self.device,
            dtype=self.dtype,
            group=self.group,
        )


class _Attention(nn.Module):
    def __init__(self, layer: int, build: Build) -> None:
        super().__init__()
        traits, options, self.names = build.traits, build.options, build.options.names
        queries, keys = (
            Share.of_heads(count, traits.head_dim, build.group)
            for count in (traits.num_heads, traits.num_kv_heads)
        )
        heads = (queries.size // traits.head_dim, keys.size // traits.head_dim)
        hidden, three = Share.all_of(traits.hidden_size), (queries, keys, keys)
        is_one = len(self.names.qkv) == 1
        self.qkv = build.linear(
            hidden,
            {self.names.qkv[0]: three}
            if is_one
            else {name: (share,) for name, share in zip(self.names.qkv, three, strict=True)},
            bias=options.qkv_bias,
        )
        self.output = build.linear(
            queries, {self.names.output: (hidden,)}, bias=options.output_bias
        )
        self.norm = (
            HeadNorm(
                *heads, traits.head_dim, traits.norm_eps, device=build.device, dtype=build.dtype
            )
            if options.qk_norm
            else None
        )
        self.attend = PagedAttention(
            layer - build.group.stage.layers(traits.num_layers).start,
            window=traits.windows[layer],
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=traits.head_dim,
            group=build.group,
        )

    def mix(self, ahead: Ahead, rotary: Rotary, step: AttentionStep) -> torch.Tensor:
        """[T, H D] that `output` takes, of what lies ahead; keys and values are stored."""
        return self.attend(self.qkv(ahead.x_TE, norm=ahead.norm), rotary, self.norm, step)

    def slots(self, prefix: str) -> Slots:
        names = [f"{prefix}.{name}" for name in (self.names.query_norm, self.names.key_norm)]
        own = self.norm.slots(*names) if self.norm is not None else {}
        return own | self.qkv.slots(prefix) | self.output.slots(prefix)


class Layer(nn.Module):
    """Shapes: T tokens, N of them, E hidden size."""

    def __init__(self, layer: int, build: Build) -> None:
        super().__init__()
        self.input_norm = build.norm()
        self.attention = _Attention(layer, build)
        self.inner_norm = build.norm()
        self.feed_forward = build.feed_forward(layer)
        mixture = build.options.mixtures.get(layer)
        self.by_token = mixture is None or mixture.router.by_token

    def forward(
        self,
        residual_TE: torch.Tensor,
        ahead: Ahead,
        rotary: Rotary,
        step: AttentionStep,
        before: RMSNorm | None = None,
    ) -> Ahead:
        """`residual` is overwritten with what leaves this layer; returned for the layer that comes
        next, which takes it behind its norm `before`."""
        return self.add(residual_TE, self.mix(ahead, rotary, step), before)

    def mix(self, ahead: Ahead, rotary: Rotary, step: AttentionStep) -> torch.Tensor:
        """The first part of `forward`, which needs all tokens: [T, H D] that `add` takes."""
        return self.attention.mix(ahead, rotary, step)

    def add(
        self, rows_NE: torch.Tensor, mixed_NC: torch.Tensor, before: RMSNorm | None = None
    ) -> Ahead:
        """The rest of it, of any tokens where `by_token`, else of all. Both halves write into the
        residual stream in place."""
        inner = self.attention.output.add(
            rows_NE, mixed_NC, self.inner_norm, in_pieces=self.feed_forward.takes_pieces
        )
        return self.feed_forward(rows_NE, inner, before)

    def after_load(self) -> None:
        """Makes what is derived from weights, which are filled now."""
        if self.attention.norm is not None:
            self.attention.norm.spread()
        if isinstance(self.feed_forward, Experts):
            self.feed_forward.after_load()

    def slots(self, prefix: str, names: TensorNames) -> Slots:
        norms = {
            f"{prefix}.input_layernorm.weight": Slot.whole(self.input_norm.weight),
            f"{prefix}.post_attention_layernorm.weight": Slot.whole(self.inner_norm.weight),
        }
        attention = self.attention.slots(f"{prefix}.{names.attention}")
        return norms | attention | self.feed_forward.slots(f"{prefix}.{names.feed_forward}")
