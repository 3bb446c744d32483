"""The pre-norm decoder that most published language models are variants of.

Grouped-query attention, SwiGLU or experts, RMSNorm and rotary positions; biases, per-head norms,
sliding windows, tied embeddings and the names of tensors are fields. It knows no file format.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from engine_service.attention.base import AttentionStep
from engine_service.layers.attention import PagedAttention
from engine_service.layers.embedding import Embedding
from engine_service.layers.experts import Experts, Mixture
from engine_service.layers.feed_forward import FeedForward
from engine_service.layers.linear import Linear
from engine_service.layers.norm import HeadNorm, RMSNorm
from engine_service.layers.rope import RotaryTable
from engine_service.models.base import CausalModel, HFConfig, ModelTraits
from engine_service.schemes.base import LinearScheme
from engine_service.schemes.unquantized import Unquantized


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
class _Build:
    """What every part of a decoder is made from."""

    traits: ModelTraits
    options: DecoderOptions
    scheme: LinearScheme
    device: torch.device
    dtype: torch.dtype

    def linear(self, in_size: int, parts: dict[str, int], *, bias: bool) -> Linear:
        return Linear(
            in_size, parts, bias=bias, scheme=self.scheme, device=self.device, dtype=self.dtype
        )

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
            )
        return FeedForward(
            traits.hidden_size,
            traits.intermediate_size,
            bias=self.options.mlp_bias,
            scheme=self.scheme,
            device=self.device,
            dtype=self.dtype,
        )


class _Attention(nn.Module):
    def __init__(self, layer: int, build: _Build) -> None:
        super().__init__()
        traits, options, self.names = build.traits, build.options, build.options.names
        heads = (traits.num_heads, traits.num_kv_heads)
        width, kv_width = (count * traits.head_dim for count in heads)
        sizes: tuple[int, ...] = (width, kv_width, kv_width)
        sizes = sizes if len(self.names.qkv) == len(sizes) else (sum(sizes),)
        self.qkv = build.linear(
            traits.hidden_size,
            dict(zip(self.names.qkv, sizes, strict=True)),
            bias=options.qkv_bias,
        )
        self.output = build.linear(
            width, {self.names.output: traits.hidden_size}, bias=options.output_bias
        )
        self.norm = (
            HeadNorm(
                *heads,
                traits.head_dim,
                traits.norm_eps,
                device=build.device,
                dtype=build.dtype,
            )
            if options.qk_norm
            else None
        )
        self.attend = PagedAttention(
            layer,
            window=traits.windows[layer],
            num_heads=traits.num_heads,
            num_kv_heads=traits.num_kv_heads,
            head_dim=traits.head_dim,
        )

    def forward(
        self,
        residual_TE: torch.Tensor,
        norm: RMSNorm,
        rotary: tuple[torch.Tensor, torch.Tensor],
        step: AttentionStep,
    ) -> torch.Tensor:
        qkv = self.qkv(residual_TE, norm=norm)
        return self.output.add(residual_TE, self.attend(qkv, rotary, self.norm, step))

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        names = [f"{prefix}.{name}" for name in (self.names.query_norm, self.names.key_norm)]
        own = self.norm.slots(*names) if self.norm is not None else {}
        return own | self.qkv.slots(prefix) | self.output.slots(prefix)


class _Layer(nn.Module):
    def __init__(self, layer: int, build: _Build) -> None:
        super().__init__()
        self.input_norm = build.norm()
        self.attention = _Attention(layer, build)
        self.inner_norm = build.norm()
        self.feed_forward = build.feed_forward(layer)

    def slots(self, prefix: str, names: TensorNames) -> dict[str, torch.Tensor]:
        norms: dict[str, torch.Tensor] = {
            f"{prefix}.input_layernorm.weight": self.input_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": self.inner_norm.weight,
        }
        attention = self.attention.slots(f"{prefix}.{names.attention}")
        return norms | attention | self.feed_forward.slots(f"{prefix}.{names.feed_forward}")


class Decoder(CausalModel):
    """A stack of pre-norm layers between an embedding and an output head."""

    @classmethod
    @abstractmethod
    def options(cls, hf_config: HFConfig) -> DecoderOptions:
        """Which variant of the decoder config.json asks for."""

    @classmethod
    def create(
        cls,
        traits: ModelTraits,
        hf_config: HFConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> CausalModel:
        return cls(traits, cls.options(hf_config), device=device, dtype=dtype)

    def __init__(
        self,
        traits: ModelTraits,
        options: DecoderOptions,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        build = _Build(
            traits=traits, options=options, scheme=Unquantized(), device=device, dtype=dtype
        )
        sizes = (traits.vocab_size, traits.hidden_size)
        self.traits = traits
        self._names = options.names
        self.embedding = Embedding(*sizes, device=device, dtype=dtype)
        self._layers = [_Layer(layer, build) for layer in range(traits.num_layers)]
        self.layers = nn.ModuleList(self._layers)
        self.norm = build.norm()
        self.head = (
            self.embedding
            if traits.tie_embeddings
            else Embedding(*sizes, device=device, dtype=dtype)
        )
        assert traits.rope is not None, "a decoder without rotary positions"
        self.rotary = RotaryTable(traits.rope, device=device)

    def embed(self, tokens: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens, places_T)

    def forward(
        self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        rotary = self.rotary(positions_T, hidden_TE.dtype)
        for layer in self._layers:
            # Both halves write into the residual stream in place.
            layer.attention(hidden_TE, layer.input_norm, rotary, step)
            layer.feed_forward(hidden_TE, layer.inner_norm)
        return hidden_TE

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden_NE, self.norm)

    def features(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden_NE)

    def head_factors(self, hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(hidden_NE), self.head.weight

    def weight_slots(self) -> dict[str, torch.Tensor]:
        names = self._names
        slots: dict[str, torch.Tensor] = {
            f"{names.embedding}.weight": self.embedding.weight,
            f"{names.norm}.weight": self.norm.weight,
        }
        if self.head is not self.embedding:
            slots["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self._layers):
            slots |= layer.slots(f"{names.layers}.{index}", names)
        return slots

    def after_load(self) -> None:
        for layer in self._layers:
            if layer.attention.norm is not None:
                layer.attention.norm.spread()

    def ignores(self, name: str) -> bool:
        tied_copy = name == "lm_head.weight" and self.traits.tie_embeddings
        return tied_copy or super().ignores(name)
