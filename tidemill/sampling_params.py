"""How to sample, in the words users know from other servers. It knows neither torch nor gRPC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Knobs of one prompt.

    `None` takes the checkpoint's default (`generation_config.json`), except `max_tokens`, where
    None means: until the context is full. Values are checked when the request is admitted; a wrong
    one raises `InvalidRequest` naming it.
    """

    n: int = 1
    """Sequences to generate for the prompt."""
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
    method: str | None = None
    """Decoding method; None is the model's own."""
    method_params: dict[str, Any] = field(default_factory=dict)
    """Knobs of the method, for example {"threshold": 0.8} for block diffusion."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
