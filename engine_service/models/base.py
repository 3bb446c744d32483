"""What the rest of the engine may know of a model, and the registry that finds its class.

It does not know files or downloads: a model is described by its config.json as a dictionary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from engine_service.attention.base import AttentionStep
from engine_service.distributed import ALONE, Group
from engine_service.kernels.vocab_share import VocabShare
from engine_service.layers.rope import RopeParameters
from engine_service.layers.slots import Slots
from engine_service.models.detection import find_architecture
from tidemill.runtime.errors import Unsupported

EXPERTS = "experts"
"""Their axis among `shared_axes`."""

HFConfig = Mapping[str, Any]
"""A parsed config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What a checkpoint says about its model. Sizes are whole-model, before any sharding."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope: RopeParameters | None
    """None: positions are embedded, heads do not turn."""
    windows: tuple[int | None, ...]
    """Sliding window of every layer; None: the layer sees everything."""
    max_model_len: int
    tie_embeddings: bool
    dtype: str
    """Number format of the checkpoint: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...]
    eot_token_ids: tuple[int, ...] = ()
    """What ends a turn, where the vocabulary tells that from the end of a text; they need not be
    among those that end a sequence."""
    mask_block: int = 1
    """Granularity of the attention mask the model was trained with; 1 is causal."""
    mask_token_id: int | None = None
    logits_shift: int = 1
    """The token at position p is decided from the logits of query p - logits_shift."""
    default_method: str = "autoregressive"
    methods: tuple[str, ...] = ("autoregressive",)
    """How it generates; empty: it is an encoder."""
    pooling: str = "last"
    """How its hidden states make an embedding, unless the checkpoint says so: mean, last or cls."""
    num_labels: int = 0
    """Of its classification head; 0: it has none."""
    num_segments: int = 1
    """Texts that it tells apart in one prompt."""
    routes_by_block: bool = False
    """Whether a block's tokens choose experts together: spans must be whole blocks."""


class CausalModel(nn.Module, ABC):
    """A language model over a paged cache. Shapes: T query tokens, E hidden size, V vocabulary."""

    traits: ModelTraits
    has_stages: ClassVar[bool] = False
    """Whether `create` makes the layers of one stage where the group has no more."""

    @classmethod
    @abstractmethod
    def read_traits(cls, hf_config: HFConfig, added_tokens: Mapping[str, int]) -> ModelTraits:
        """Traits from config.json; `added_tokens` are the tokenizer's special tokens.

        Raises Unsupported for a trait that the class does not implement.
        """

    @classmethod
    @abstractmethod
    def create(
        cls,
        traits: ModelTraits,
        hf_config: HFConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = ALONE,
    ) -> CausalModel:
        """A model whose parameters lie on `device` in `dtype`, not yet filled; of a group of ranks
        each holds its share of the layers of the group's stage."""

    @classmethod
    def shared_axes(
        cls, traits: ModelTraits, hf_config: HFConfig, *, whole_experts: bool = False
    ) -> dict[str, int]:
        """What ranks hold equal shares of: name to size. Key-value heads need not divide."""
        return {
            "attention heads": traits.num_heads,
            "intermediate_size": traits.intermediate_size,
        }

    @abstractmethod
    def embed(self, tokens: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        """[T, E] embeddings of the ids that stand at `places` [T] int64 of a flat int64 table.
        Of the first stage."""

    @abstractmethod
    def forward(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        step: AttentionStep,
        reads_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeddings at [T] int64 positions, or what the stage ahead made of them, to hidden states
        [T, E] behind this stage's layers; `hidden` is overwritten. What follows is of the last.

        `reads` [N] int64 are the tokens whose hidden states anybody reads (None: all); what stands
        at others may then be anything. Keys and values of all tokens are stored."""

    @property
    def finishes_rows(self) -> bool:
        """Whether `mix` and `finish` are there: the last layer ends token by token."""
        return False

    def mix(
        self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """`forward` up to the last layer's attention, [T, C]; keys and values are stored. `finish`
        makes hidden states of any rows of both."""
        raise NotImplementedError(f"{self.traits.architecture} ends with all of its tokens")

    def finish(self, hidden_NE: torch.Tensor, mixed_NC: torch.Tensor) -> None:
        """Overwrites the rows of `hidden` with what `forward` makes of them. The same rows by all
        ranks of a group."""
        raise NotImplementedError(f"{self.traits.architecture} ends with all of its tokens")

    @abstractmethod
    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, V] in the model's number format, of some of forward's hidden states. Encoders, whose
        `traits.methods` are empty, have none."""

    @property
    def vocab_share(self) -> VocabShare | None:
        """Which ids this rank's share of the output head is of; None: all."""
        return None

    def own_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, room] of `vocab_share`."""
        return self.logits(hidden_NE)

    @abstractmethod
    def features(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E] last hidden states, of some of forward's: what embeddings are pooled from."""

    def label_probs(self, pooled_NE: torch.Tensor) -> torch.Tensor:
        """[N, L] probabilities of labels, of pooled states; only where `traits.num_labels`."""
        raise NotImplementedError(f"{self.traits.architecture} has no classification head")

    def head_factors(self, hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(x [N, E], W [V, E]) whose product x W^T `own_logits` are; None where they are more."""
        return None

    @property
    def has_head_factors(self) -> bool:
        """Whether `head_factors` tells any."""
        return type(self).head_factors is not CausalModel.head_factors

    @abstractmethod
    def weight_slots(self) -> Slots:
        """Checkpoint tensor name to the parameter views that take it, or this rank's share of
        it."""

    def after_load(self) -> None:
        """Called once when every slot is filled; repacks what the layers want otherwise."""

    def ignores(self, name: str) -> bool:
        """True for a checkpoint tensor that is derived and need not be loaded."""
        return name.endswith(".rotary_emb.inv_freq")


class ModelRegistry:
    """Architecture name (config.json `architectures[0]`) to model class."""

    def __init__(self) -> None:
        self._classes: dict[str, type[CausalModel]] = {}

    def register(self, *architectures: str) -> Callable[[type[CausalModel]], type[CausalModel]]:
        """Class decorator; a name can be taken once."""

        def add(kind: type[CausalModel]) -> type[CausalModel]:
            for name in architectures:
                assert name not in self._classes, f"{name} is registered twice"
                self._classes[name] = kind
            return kind

        return add

    def names(self) -> tuple[str, ...]:
        """All registered architectures, sorted."""
        return tuple(sorted(self._classes))

    def find(self, hf_config: HFConfig) -> type[CausalModel]:
        """The class that config.json asks for; raises Unsupported listing the known ones,
        and what `find_architecture` raises."""
        asked = find_architecture(hf_config, self._classes.keys())
        if asked in self._classes:
            return self._classes[asked]
        raise Unsupported(
            f"{asked or 'config.json without `architectures`'} is not supported; supported "
            f"architectures: {', '.join(self.names())}",
            reason="ARCHITECTURE_UNSUPPORTED",
            param="model",
        )


REGISTRY = ModelRegistry()
register_model = REGISTRY.register
