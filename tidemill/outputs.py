"""What the calls of `LLM` return. Plain values, whichever way they came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """One token's log-probability at one position; `rank` 1 is the most likely token.

    `rank` is None for alternatives of which only the order is known to matter.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence. `logprobs[i]` maps token ids to their Logprob at position i."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """stop, length, abort or error."""
    stop_reason: int | str | None
    """The stop string or token id that ended the sequence; None for end-of-sequence."""
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """What a request cost, summed over its sequences.

    `forward_passes` counts every model step the request took part in; `denoise_steps` those that
    decided at least one position.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    forward_passes: int
    denoise_steps: int
    preemptions: int

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens for each forward pass, those that only store something counted."""
        return self.output_tokens / max(1, self.forward_passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """What `LLM.embed` returns for an input."""

    prompt_token_ids: list[int]
    embedding: list[float]
    cached_tokens: int
    """Leading tokens of the prompt whose keys and values were found in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """What `LLM.classify` returns for an input."""

    prompt_token_ids: list[int]
    probs: list[float]
    """One per label; that of a single label is of that label alone."""
    label: str
    """The likeliest one, as the checkpoint's config.json names it, else LABEL_0 and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One finished prompt with its sequences, in the order of their index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    usage: RequestUsage
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One beam; tokens and text are those of the prompt and the answer, without a stop token."""

    tokens: list[int]
    text: str
    cum_logprob: float
    """Of the answer, a stop token included."""
    finish_reason: str
    """stop or length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """What `LLM.beam_search` finds for a prompt, the best first."""

    sequences: list[BeamSearchSequence]
