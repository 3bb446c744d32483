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
from engine_service.kernels.activation import silu_mul
from engine_service.kernels.rotary import rotate
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
        self.heads = (traits.num_heads, traits.num_kv_heads)
        self.head_dim = traits.head_dim
        width, kv_width = (count * traits.head_dim for count in self.heads)
        self.qkv = build.linear(
            traits.hidden_size,
            {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width},
            bias=options.qkv_bias,
        )
        self.output = build.linear(width, {"o_proj": traits.hidden_size}, bias=options.output_bias)
        self.norm = (
            HeadNorm(
                *self.heads,
                traits.head_dim,
                traits.norm_eps,
                device=build.device,
                dtype=build.dtype,
            )
            if options.qk_norm
            else None
        )
        self.attend = PagedAttention(layer, window=traits.windows[layer], head_dim=traits.head_dim)

    def forward(
        self,
        x_TE: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        step: AttentionStep,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.heads
        qkv = self.qkv(x_TE).view(x_TE.shape[0], -1, self.head_dim)
        qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        if self.norm is not None:
            qk = self.norm(qk)
        # Query and key heads turn by the same angles: one pass over both.
        qk = rotate(qk, *rotary)
        mixed = self.attend(qk[:, :num_heads], qk[:, num_heads:], v, step)
        out: torch.Tensor = self.output(mixed.flatten(1))
        return out

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

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(silu_mul(self.gate_up(x_TE)))
        return out

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

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        residual = self.embedding(input_ids_T)
        rotary = self.rotary(positions_T, residual.dtype)
        pending: torch.Tensor | None = None  # the branch not yet added to the residual
        for layer in self._layers:
            if pending is None:
                x = layer.input_norm(residual)
            else:
                x, residual = layer.input_norm.add(pending, residual)
            x = layer.attention(x, rotary, step)
            x, residual = layer.inner_norm.add(x, residual)
            pending = layer.feed_forward(x)
        assert pending is not None, "a decoder without layers"
        return self.norm.add(pending, residual)[0]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden_NE)

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
