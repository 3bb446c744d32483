"""BERT: an encoder for embeddings, and as a cross-encoder for scores (Devlin et al. 2018, arXiv
1810.04805). Every position sees every other, and norms follow what they normalise.

It knows no prompt of two texts: a token of the second is a token of its own, whose row of the
embedding holds the segment's vector as well.
Shape legend: T query tokens, N some of them, E hidden size, D head size, V vocabulary, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine_service.attention.base import AttentionStep
from engine_service.core.step import FULL
from engine_service.distributed import ALONE, Group
from engine_service.layers.attention import PagedAttention
from engine_service.layers.embedding import Embedding
from engine_service.layers.feed_forward import AFTER_FEED_FORWARD
from engine_service.layers.linear import Linear
from engine_service.layers.norm import LayerNorm
from engine_service.layers.slots import Share, Slot, Slots
from engine_service.models.base import CausalModel, HFConfig, ModelTraits, register_model
from engine_service.models.hf_config import (
    full_windows,
    norm_eps,
    positive,
    read_dtype,
    refuse_unknown,
)
from engine_service.schemes.unquantized import Unquantized

_TANH_GELU = partial(functional.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": functional.relu,
}
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, *_ACTIVATIONS),
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "rope_scaling": (None,),
}
_SEGMENTS = 2
"""The most that BERT's tokenizers tell apart; checkpoints may have vectors for more."""
_DEFAULTS = {"type_vocab_size": _SEGMENTS}


def _traits(
    hf_config: HFConfig, *, first_position: int, max_segments: int, **own: Any
) -> ModelTraits:
    refuse_unknown(hf_config, implements=("hidden_act", "is_causal"))
    refuse_unknown(hf_config, neutral_values=_IMPLEMENTED)
    hidden_size = positive(hf_config, "hidden_size")
    num_heads = positive(hf_config, "num_attention_heads")
    return ModelTraits(
        architecture=hf_config["architectures"][0],
        hidden_size=hidden_size,
        num_layers=positive(hf_config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=positive(hf_config, "intermediate_size"),
        vocab_size=positive(hf_config, "vocab_size"),
        norm_eps=norm_eps(hf_config, "layer_norm_eps", 1e-12),
        rope=None,
        windows=full_windows(hf_config),
        max_model_len=positive(hf_config, "max_position_embeddings") - first_position,
        tie_embeddings=False,
        dtype=read_dtype(hf_config),
        eos_token_ids=(),
        mask_block=FULL,
        logits_shift=0,
        default_method="",
        methods=(),
        pooling="mean",
        num_segments=min(max_segments, positive({**_DEFAULTS, **hf_config}, "type_vocab_size")),
        **own,
    )


class _Layer(nn.Module):
    def __init__(
        self, layer: int, traits: ModelTraits, act: str, group: Group, **where: Any
    ) -> None:
        super().__init__()
        size = Share.all_of(traits.hidden_size)
        inner = Share.even(traits.intermediate_size, group)
        heads = Share.of_heads(traits.num_heads, traits.head_dim, group)

        def linear(inputs: Share, *names: str, outputs: Share, site: int = 0) -> Linear:
            parts, more = dict.fromkeys(names, (outputs,)), {"group": group, "site": site, **where}
            return Linear(inputs, parts, bias=True, scheme=Unquantized(), **more)

        norm = partial(LayerNorm, traits.hidden_size, traits.norm_eps, **where)
        self.qkv = linear(size, "query", "key", "value", outputs=heads)
        self.output = linear(heads, "dense", outputs=size)
        self.output_norm = norm()
        self.inner = linear(size, "dense", outputs=inner)
        self.outer = linear(inner, "dense", outputs=size, site=AFTER_FEED_FORWARD)
        self.outer_norm = norm()
        self._act = _ACTIVATIONS[act]
        self._attend = PagedAttention(
            layer,
            window=None,
            num_heads=heads.size // traits.head_dim,
            num_kv_heads=heads.size // traits.head_dim,
            head_dim=traits.head_dim,
        )

    def forward(
        self,
        x_TE: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        step: AttentionStep,
    ) -> torch.Tensor:
        """[T, E]; `x` is overwritten."""
        mixed = self._attend(self.qkv(x_TE), rotary, None, step)
        x_TE = self.output_norm(self.output.add(x_TE, mixed).x_TE)
        return self.outer_norm(self.outer.add(x_TE, self._act(self.inner(x_TE))).x_TE)

    def slots(self, prefix: str) -> Slots:
        return (
            self.qkv.slots(f"{prefix}.attention.self")
            | self.output.slots(f"{prefix}.attention.output")
            | self.output_norm.slots(f"{prefix}.attention.output.LayerNorm")
            | self.inner.slots(f"{prefix}.intermediate")
            | self.outer.slots(f"{prefix}.output")
            | self.outer_norm.slots(f"{prefix}.output.LayerNorm")
        )


@register_model("BertModel")
class Bert(CausalModel):
    """MiniLM's, BGE's and E5's shape; the pooler of the checkpoint takes no part in embeddings."""

    prefix = ""
    """Of all names of the encoder's tensors."""
    max_segments = _SEGMENTS

    @classmethod
    def first_position(cls, hf_config: HFConfig) -> int:
        """Of the table of positions, the row of a prompt's first token."""
        return 0

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        first = cls.first_position(hf_config)
        return _traits(hf_config, first_position=first, max_segments=cls.max_segments)

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
        return cls(traits, hf_config, device=device, dtype=dtype, group=group)

    def __init__(
        self,
        traits: ModelTraits,
        hf_config: HFConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        size, segments = traits.hidden_size, positive({**_DEFAULTS, **hf_config}, "type_vocab_size")
        self.traits = traits
        self.words = Embedding(traits.num_segments * traits.vocab_size, size, **where)
        self._first = self.first_position(hf_config)
        self.positions = Embedding(traits.max_model_len + self._first, size, **where)
        self.segments = Embedding(segments, size, **where)
        self.norm = LayerNorm(size, traits.norm_eps, **where)
        act = hf_config.get("hidden_act") or "gelu"
        self._layers = [_Layer(i, traits, act, group, **where) for i in range(traits.num_layers)]
        self.layers = nn.ModuleList(self._layers)

    def embed(self, tokens: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        return self.words(tokens, places_T)

    def forward(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        step: AttentionStep,
        reads_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Whatever is read, all is computed: a step of an encoder pools, and that reads everything.
        positions = self.positions.weight[self._first :]
        hidden_TE = self.norm(hidden_TE + functional.embedding(positions_T, positions))
        # Attention turns heads as it stores them: here by nothing.
        angles = (len(hidden_TE), 1, self.traits.head_dim)
        rotary = hidden_TE.new_ones(angles), hidden_TE.new_zeros(angles)
        for layer in self._layers:
            hidden_TE = layer(hidden_TE, rotary, step)
        return hidden_TE

    def features(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return hidden_NE

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"{self.traits.architecture} has no output head")

    def weight_slots(self) -> Slots:
        slots = {
            "embeddings.word_embeddings.weight": Slot.whole(
                self.words.weight[: self.traits.vocab_size]
            ),
            "embeddings.position_embeddings.weight": self.positions.slot(),
            "embeddings.token_type_embeddings.weight": self.segments.slot(),
            **self.norm.slots("embeddings.LayerNorm"),
        }
        for index, layer in enumerate(self._layers):
            slots |= layer.slots(f"encoder.layer.{index}")
        return {f"{self.prefix}{name}": slot for name, slot in slots.items()}

    def after_load(self) -> None:
        words = self.words.weight.view(self.traits.num_segments, -1, self.traits.hidden_size)
        for segment in reversed(range(self.traits.num_segments)):
            words[segment] = words[0] + self.segments.weight[segment]

    def ignores(self, name: str) -> bool:
        own = name.removeprefix(self.prefix)
        return own.startswith("pooler.") or own == "embeddings.position_ids"


@register_model("BertForSequenceClassification")
class BertClassifier(Bert):
    """A pooler and a head over the first position: a cross-encoder, where it has a single label."""

    prefix = "bert."
    pooler_prefix, head_name = "bert.pooler", "classifier"
    """Of the two layers' tensors."""

    @classmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        labels = hf_config.get("id2label")
        count = len(labels) if labels else int(hf_config.get("num_labels", 2))
        first = cls.first_position(hf_config)
        return _traits(
            hf_config, first_position=first, max_segments=cls.max_segments, num_labels=count
        )

    def __init__(
        self,
        traits: ModelTraits,
        hf_config: HFConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        super().__init__(traits, hf_config, device=device, dtype=dtype, group=group)
        size = Share.all_of(traits.hidden_size)
        linear = partial(Linear, size, bias=True, scheme=Unquantized(), device=device, dtype=dtype)
        self.pooler = linear({"dense": (size,)})
        self.head = linear({self.head_name: (Share.all_of(traits.num_labels),)})
        self._activate = _head_activation(hf_config, traits.num_labels)

    def label_probs(self, pooled_NE: torch.Tensor) -> torch.Tensor:
        labels = self.head(self.pooler(pooled_NE).tanh())
        return self._activate(labels.float())

    def weight_slots(self) -> Slots:
        head = {name.removeprefix("head."): slot for name, slot in self.head.slots("head").items()}
        return super().weight_slots() | self.pooler.slots(self.pooler_prefix) | head


_OF_SCORES: Mapping[str, Any] = {"Identity": torch.Tensor.float, "Sigmoid": torch.sigmoid}


def _head_activation(
    hf_config: HFConfig, num_labels: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What sentence-transformers wrote down, else a probability per label."""
    wishes = hf_config.get("sentence_transformers") or {}
    named = wishes.get("activation_fn") or hf_config.get("sbert_ce_default_activation_function")
    if named:
        kind = str(named).rsplit(".", 1)[-1]
        refuse_unknown({"activation_fn": kind}, neutral_values={"activation_fn": (*_OF_SCORES,)})
        return _OF_SCORES[kind]
    if num_labels == 1 or hf_config.get("problem_type") == "multi_label_classification":
        return torch.sigmoid
    return partial(torch.softmax, dim=-1)
