"""The pre-norm decoder that most published language models are variants of.

Grouped-query attention, SwiGLU or experts, RMSNorm and rotary positions; biases, per-head norms,
sliding windows, tied embeddings and the names of tensors are fields. It knows no file format.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine_service.attention.base import AttentionStep
from engine_service.core.step import FULL
from engine_service.distributed import ALONE, Group
from engine_service.kernels.vocab_share import VocabShare
from engine_service.layers.attention import PagedAttention
from engine_service.layers.embedding import Embedding
from engine_service.layers.experts import Experts, Mixture
from engine_service.layers.feed_forward import FeedForward
from engine_service.layers.linear import Linear
from engine_service.layers.norm import HeadNorm, RMSNorm
from engine_service.layers.rope import RotaryTable
from engine_service.layers.slots import Share, Slot, Slots
from engine_service.models.base import EXPERTS, CausalModel, HFConfig, ModelTraits
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
    def __init__(self, layer: int, build: _Build) -> None:
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

    def forward(
        self,
        residual_TE: torch.Tensor,
        norm: RMSNorm,
        rotary: tuple[torch.Tensor, torch.Tensor],
        step: AttentionStep,
    ) -> torch.Tensor:
        qkv = self.qkv(residual_TE, norm=norm)
        return self.output.add(residual_TE, self.attend(qkv, rotary, self.norm, step))

    def slots(self, prefix: str) -> Slots:
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

    def slots(self, prefix: str, names: TensorNames) -> Slots:
        norms = {
            f"{prefix}.input_layernorm.weight": Slot.whole(self.input_norm.weight),
            f"{prefix}.post_attention_layernorm.weight": Slot.whole(self.inner_norm.weight),
        }
        attention = self.attention.slots(f"{prefix}.{names.attention}")
        return norms | attention | self.feed_forward.slots(f"{prefix}.{names.feed_forward}")


class Decoder(CausalModel):
    """A stack of pre-norm layers between an embedding and an output head."""

    has_stages = True

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
        group: Group = ALONE,
    ) -> CausalModel:
        return cls(traits, cls.options(hf_config), device=device, dtype=dtype, group=group)

    @classmethod
    def shared_axes(
        cls, traits: ModelTraits, hf_config: HFConfig, *, whole_experts: bool = False
    ) -> dict[str, int]:
        mixtures = cls.options(hf_config).mixtures
        axes = super().shared_axes(traits, hf_config, whole_experts=whole_experts)
        if traits.mask_block >= FULL:
            # A sparse cache ranks keys by all queries of a key-value head.
            axes["key-value heads"] = traits.num_kv_heads
        if len(mixtures) == traits.num_layers:
            del axes["intermediate_size"]
        for mixture in mixtures.values():
            own = {"moe_intermediate_size": mixture.inner_size}
            axes |= {EXPERTS: mixture.router.num_experts} if whole_experts else own
            axes |= {"width of shared experts": mixture.shared_size}
        return axes

    def __init__(
        self,
        traits: ModelTraits,
        options: DecoderOptions,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        stage, is_tied = group.stage, traits.tie_embeddings
        self._own = stage.layers(traits.num_layers)
        self._embeds, self._decides = stage.is_first or (stage.is_last and is_tied), stage.is_last

        def build(is_here: bool) -> _Build:
            # What another stage holds has a name and a shape here, and takes no memory.
            own: dict[str, Any] = {"device": device if is_here else torch.device("meta")}
            own |= {"dtype": dtype, "group": group, "scheme": Unquantized()}
            return _Build(traits=traits, options=options, **own)

        self.traits = traits
        self._names = options.names
        self.embedding = build(self._embeds).embedding()
        self._all = [_Layer(at, build(at in self._own)) for at in range(traits.num_layers)]
        self._layers = self._all[self._own.start : self._own.stop]
        self.layers = nn.ModuleList(self._layers)
        self.norm = build(self._decides).norm()
        self.head = self.embedding if is_tied else build(self._decides).embedding()
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

    @property
    def vocab_share(self) -> VocabShare | None:
        return self.head.share

    def own_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self.head.own_logits(hidden_NE, self.norm)

    def head_factors(self, hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(hidden_NE), self.head.weight

    def weight_slots(self) -> Slots:
        names = self._names
        slots = {
            f"{names.embedding}.weight": self.embedding.slot().held_if(self._embeds),
            f"{names.norm}.weight": Slot.whole(self.norm.weight).held_if(self._decides),
        }
        if self.head is not self.embedding:
            slots["lm_head.weight"] = self.head.slot().held_if(self._decides)
        for index, layer in enumerate(self._all):
            parts = layer.slots(f"{names.layers}.{index}", names)
            slots |= {name: slot.held_if(index in self._own) for name, slot in parts.items()}
        return slots

    def after_load(self) -> None:
        for layer in self._layers:
            if layer.attention.norm is not None:
                layer.attention.norm.spread()

    def ignores(self, name: str) -> bool:
        tied_copy = name == "lm_head.weight" and self.traits.tie_embeddings
        return tied_copy or super().ignores(name)
