"""What a request asks for, in token terms. Plain values; no torch, no protobuf."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_LISTED_IDS = 300
"""Most entries of logit_bias and of the stop ids (with the eos ids): width of the device tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Knobs of one sequence. `None` means: take the checkpoint's default.

    `max_tokens` None means: until the context is full. `top_k` 0 or -1 turns the filter off.
    `logprobs` and `prompt_logprobs` are the number of alternatives; None means none at all.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not appear in the output."""


class ReasoningSpec(NamedTuple):
    """Free text that begins with `start`, or has begun already where that is empty, up to `end`; or
    `lark` of a whole output, in which @answer stands for what follows the constraint."""

    start: str = ""
    end: str = ""
    lark: str = ""


class ConstraintSpec(NamedTuple):
    """A grammar that the whole output must follow; `kind` is a field of the contract's Constraint,
    `text` what stands in it (of choices their JSON list). `reasoning` may stand in front."""

    kind: str
    text: str
    reasoning: ReasoningSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """SamplingParams after admission: every default filled in, every value checked.

    `suppress` are the ids that must not be chosen before `min_tokens` tokens are out.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    seed: int
    choice: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    stop_token_sequences: tuple[tuple[int, ...], ...]
    suppress: tuple[int, ...]
    logprobs: int | None
    prompt_logprobs: int | None


class MethodParams:
    """What a worker, which knows no method's knobs, must know of them. Knobs of methods are
    subclasses."""

    __slots__ = ()

    @property
    def holds_ends(self) -> bool:
        """Whether ids that end an answer do not count in how sure a choice is."""
        return False

    def ahead_of(self, num_given: int) -> MethodParams:
        """The same knobs for an output whose last `num_given` tokens came with the request."""
        return self


def given(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are null, which stands for not given, as for fields of OpenAI's bodies."""
    return {name: value for name, value in knobs.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingChoice:
    """The decoding method a request names (None: the engine's default) and its raw knobs."""

    method: str | None = None
    params: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", given(self.params))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Budgets of one step and of the queue."""

    max_rows: int
    token_budget: int
    logit_budget: int
    canvas_budget: int
    """Query tokens per step of canvases that are computed whole; the last one may overdraw it."""
    max_queued_requests: int
    age_bound_s: float
    max_queued_tokens: int = sys.maxsize
    """Tokens of all waiting requests."""
    max_queue_delay_s: float = 0.0
    """Longest wait that a new request may expect, in seconds; 0: any."""
    foreseen_tokens: int = 2048
    """Query tokens of the decoding rows from which next spans are planned from what strategies
    assume of decisions. Below, a step takes as long for half of the rows: one that turns out to be
    in vain costs more than sitting one out."""
    num_cohorts: int = 1
    """Steps in flight that have no row in common (core/cohorts.py)."""

    def are_met(self, num_waiting: int, num_tokens: int) -> bool:
        """Whether the next step would be the same if more than these requests waited, of whose
        prompts so many tokens have to be computed."""
        fills = num_tokens >= self.token_budget and self.num_cohorts == 1
        return fills or num_waiting >= self.max_rows


POOLING_KINDS = ("mean", "last", "cls")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChoice:
    """What a caller wants of a prompt's hidden states. None: the model's default."""

    task: str = "embed"
    """embed, classify (a probability per label) or score (that of the one label)."""
    kind: str | None = None
    """mean, last or cls."""
    normalize: bool | None = None
    dimensions: int | None = None
    pair_start: int | None = None
    """Position of the first token of the second text; None: there is one text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams(MethodParams):
    """PoolChoice after admission."""

    kind: str
    classifies: bool = False
    """The pooled state goes through the model's classification head; nothing else counts then."""
    normalize: bool = False
    dimensions: int = 0
    """Leading features that are kept (Matryoshka; Kusupati et al. 2022, arXiv 2205.13147)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What a model's hidden states can be pooled into."""

    architecture: str
    dimensions: int
    """Features of an embedding."""
    kind: str
    """How its embeddings are pooled, unless a request says otherwise."""
    normalize: bool = True
    num_labels: int = 0
    """Of the classification head; 0: it has none."""
    num_segments: int = 1
    """Texts that the model tells apart in one prompt."""
    refusal: str = ""
    """Why its embeddings are not served; empty: they are."""
