"""The pre-norm decoder that most published language models are variants of.

What a layer of it may be is said in decoder_layer.py. It knows no file format.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from engine_service.attention.base import AttentionStep
from engine_service.core.step import FULL
from engine_service.distributed import ALONE, Group
from engine_service.kernels.vocab_share import VocabShare
from engine_service.layers.ahead import Ahead
from engine_service.layers.rope import RotaryTable
from engine_service.layers.slots import Slot, Slots
from engine_service.models.base import EXPERTS, CausalModel, HFConfig, ModelTraits
from engine_service.models.decoder_layer import Build, DecoderOptions, Layer
from engine_service.schemes.unquantized import Unquantized


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

        def build(is_here: bool) -> Build:
            # What another stage holds has a name and a shape here, and takes no memory.
            own: dict[str, Any] = {"device": device if is_here else torch.device("meta")}
            own |= {"dtype": dtype, "group": group, "scheme": Unquantized()}
            return Build(traits=traits, options=options, **own)

        self.traits = traits
        self._names = options.names
        self.embedding = build(self._embeds).embedding()
        self._all = [Layer(at, build(at in self._own)) for at in range(traits.num_layers)]
        self._layers = self._all[self._own.start : self._own.stop]
        self.layers = nn.ModuleList(self._layers)
        self.norm = build(self._decides).norm()
        self.head = self.embedding if is_tied else build(self._decides).embedding()
        assert traits.rope is not None, "a decoder without rotary positions"
        self.rotary = RotaryTable(traits.rope, device=device)

    def embed(self, tokens: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens, places_T)

    def forward(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        step: AttentionStep,
        reads_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mixed_TC = self.mix(hidden_TE, positions_T, step)
        # Layers of the stages behind this one take keys and values from all that it passes on.
        reads = reads_N if self._decides else None
        if reads is None or (len(reads) and not self.finishes_rows):
            self.finish(hidden_TE, mixed_TC)
        elif len(reads):
            rows_NE, mixed_NC = (x.index_select(0, reads) for x in (hidden_TE, mixed_TC))
            self.finish(rows_NE, mixed_NC)
            hidden_TE.index_copy_(0, reads, rows_NE)
        return hidden_TE

    @property
    def finishes_rows(self) -> bool:
        return self._decides and self._layers[-1].by_token

    def mix(
        self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        rotary = self.rotary(positions_T, hidden_TE.dtype)
        ahead = Ahead(hidden_TE, self._layers[0].input_norm)
        for layer, behind in pairwise(self._layers):
            ahead = layer(hidden_TE, ahead, rotary, step, behind.input_norm)
        return self._layers[-1].mix(ahead, rotary, step)

    def finish(self, hidden_NE: torch.Tensor, mixed_NC: torch.Tensor) -> None:
        self._layers[-1].add(hidden_NE, mixed_NC)

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
            layer.after_load()

    def ignores(self, name: str) -> bool:
        tied_copy = name == "lm_head.weight" and self.traits.tie_embeddings
        return tied_copy or super().ignores(name)
