"""The pre-norm decoder that most published language models are variants of.

Grouped-query attention, SwiGLU, RMSNorm and rotary positions; biases, per-head norms, sliding
windows and tied embeddings are fields. It knows no checkpoint format beyond tensor names.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from engine_service.attention.base import AttentionStep
from engine_service.layers.attention import PagedAttention
from engine_service.layers.embedding import Embedding
from engine_service.layers.linear import Linear
from engine_service.layers.norm import HeadNorm, RMSNorm
from engine_service.layers.rope import RotaryTable
from engine_service.models.base import CausalModel, HFConfig, ModelTraits
from engine_service.schemes.base import LinearScheme
from engine_service.schemes.unquantized import Unquantized


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """Where the variants differ beyond their sizes."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation."""


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


class _Attention(nn.Module):
    def __init__(self, layer: int, build: _Build) -> None:
        super().__init__()
        traits, options = build.traits, build.options
        heads = (traits.num_heads, traits.num_kv_heads)
        width, kv_width = (count * traits.head_dim for count in heads)
        self.qkv = build.linear(
            traits.hidden_size,
            {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width},
            bias=options.qkv_bias,
        )
        self.output = build.linear(width, {"o_proj": traits.hidden_size}, bias=options.output_bias)
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
        own = self.norm.slots(prefix) if self.norm is not None else {}
        return own | self.qkv.slots(prefix) | self.output.slots(prefix)


class _FeedForward(nn.Module):
    def __init__(self, build: _Build) -> None:
        super().__init__()
        traits, bias = build.traits, build.options.mlp_bias
        inner = traits.intermediate_size
        self.gate_up = build.linear(
            traits.hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=bias
        )
        self.down = build.linear(inner, {"down_proj": traits.hidden_size}, bias=bias)

    def forward(self, residual_TE: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        gated = self.gate_up(residual_TE, norm=norm, gated=True)
        return self.down.add(residual_TE, gated)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        return self.gate_up.slots(prefix) | self.down.slots(prefix)


class _Layer(nn.Module):
    def __init__(self, layer: int, build: _Build) -> None:
        super().__init__()
        self.input_norm = build.norm()
        self.attention = _Attention(layer, build)
        self.inner_norm = build.norm()
        self.feed_forward = _FeedForward(build)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        norms: dict[str, torch.Tensor] = {
            f"{prefix}.input_layernorm.weight": self.input_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": self.inner_norm.weight,
        }
        attention = self.attention.slots(f"{prefix}.self_attn")
        return norms | attention | self.feed_forward.slots(f"{prefix}.mlp")


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
        self.embedding = Embedding(*sizes, device=device, dtype=dtype)
        self._layers = [_Layer(layer, build) for layer in range(traits.num_layers)]
        self.layers = nn.ModuleList(self._layers)
        self.norm = build.norm()
        self.head = (
            self.embedding
            if traits.tie_embeddings
            else Embedding(*sizes, device=device, dtype=dtype)
        )
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

    def weight_slots(self) -> dict[str, torch.Tensor]:
        slots: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.norm.weight,
        }
        if self.head is not self.embedding:
            slots["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self._layers):
            slots |= layer.slots(f"model.layers.{index}")
        return slots

    def after_load(self) -> None:
        for layer in self._layers:
            if layer.attention.norm is not None:
                layer.attention.norm.spread()

    def ignores(self, name: str) -> bool:
        tied_copy = name == "lm_head.weight" and self.traits.tie_embeddings
        return tied_copy or super().ignores(name)
