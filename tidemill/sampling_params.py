"""How to sample, in the words users know from other servers. It knows neither torch nor gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.kinds import settle_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole answer must be: exactly one of these."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark as llguidance reads it, or GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseParams:
    """The sparse cache of full-canvas models (LLaDA, Dream): an approximation that keeps a share of
    the keys and values outside of the block that is being revealed.

    Values are checked when the request is admitted; where it is not enabled nothing but
    `block_length` is asked for, and no other value is looked at. Models whose cache is exact refuse
    it as the knob `cache`, which it is.
    """

    enabled: bool = False
    """False: dense attention over everything, and no KV pages."""
    retention_ratio: float = 0.5
    """Share of the positions outside of the block that are kept, in (0, 1]."""
    delay_step: int = 1
    """Whole steps of a block before the one that chooses what is kept."""
    block_length: int | None = None
    """Positions revealed together; None is the engine's default."""
    head_select: bool = False
    """Every key-value head keeps positions of its own."""
    pool_kernel: int = 3
    """Neighbours that scores are max-pooled over, an odd number; 1: none."""
    refresh_interval: int | None = None
    """Steps of a block after which it is chosen anew; None: once a block."""

    @property
    def method_params(self) -> dict[str, Any]:
        """The same as knobs of the decoding method."""
        of_cache = ("retention_ratio", "delay_step", "head_select", "pool_kernel")
        named = ("block_length", "refresh_interval") if self.enabled else ("block_length",)
        given = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        if not self.enabled:
            return {"cache": "none", **given}
        return {"cache": "sparse", **{name: getattr(self, name) for name in of_cache}, **given}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Knobs of one prompt.

    `None` takes the checkpoint's default (`generation_config.json`), except `max_tokens`, where
    None means: until the context is full. A value of the wrong kind (a text for a number) is a
    TypeError at once; what it says is checked when the request is admitted, and a wrong one raises
    `InvalidRequest` naming it.
    """

    n: int = 1
    """Sequences to generate for the prompt: 1,024 at most, of a service what its --max-n says."""
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1 turns the filter off."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: list[int] = field(default_factory=list)
    """Empty: all of them."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that must not appear, as the tokenizer writes them with and without a space in front;
    of several tokens only where tokens are decided from the left."""
    structured_outputs: StructuredOutputsParams | None = None
    """A grammar that the whole answer must follow; it ends where the grammar is complete."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else the engine is doing."""
    max_tokens: int | None = 16
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    """Strings that end the text; they are cut off unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives per generated token; 0 returns the chosen token's only."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens of the prompt; -1: as many as the context leaves beside the answer."""
    truncation_side: str = "left"
    """Where `truncate_prompt_tokens` cuts: left keeps the last tokens, right the first ones."""
    method: str | None = None
    """Decoding method; None is the model's own."""
    method_params: dict[str, Any] = field(default_factory=dict)
    """Knobs of the method, for example {"threshold": 0.8} for block diffusion."""
    sparse: SparseParams | None = None
    """Knobs of a full canvas's cache; those in `method_params` come before them."""

    def __post_init__(self) -> None:
        settle_kinds(self)

    @property
    def knobs(self) -> dict[str, Any]:
        """All knobs of the method."""
        return (
            self.method_params
            if self.sparse is None
            else {**self.sparse.method_params, **self.method_params}
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A search for the likeliest answers, the same that transformers finds; `LLM.beam_search` takes
    them, and the clients' `generate` and `chat` in the place of SamplingParams. Autoregressive
    models only."""

    beam_width: int
    """Beams, all of which are returned, the best first."""
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    """The sum of log-probabilities is divided by the length to the power of this."""
    early_stopping: bool = False
    """Take the first `beam_width` that end, instead of waiting for better ones."""

    def __post_init__(self) -> None:
        settle_kinds(self)
