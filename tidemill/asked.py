"""What is generated and how, as TextService's fields. It does not know calls or gRPC."""

from __future__ import annotations

from typing import TypeAlias

from tidemill.conversation import Fields
from tidemill.sampling_params import BeamSearchParams, SamplingParams
from tidemill.structured import constraint_of

Params: TypeAlias = SamplingParams | BeamSearchParams

_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "min_tokens",
    "allowed_token_ids",
)


def sampling_fields(params: SamplingParams) -> Fields:
    """Fields of TextOptions."""
    asked = constraint_of(params.structured_outputs)
    return {
        "sampling": {name: getattr(params, name) for name in _SCALARS},
        "decoding": {"method": params.method or "", "params": params.knobs},
        "stop": params.stop_strings,
        "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
        "n": params.n,
        "logprobs": {"top": params.logprobs, "prompt_top": params.prompt_logprobs},
        "truncate_prompt_tokens": params.truncate_prompt_tokens,
        "truncation_side": params.truncation_side,
        "bad_words": params.bad_words,
        "constraint": None if asked is None else asked.message,
    }


def beam_fields(params: BeamSearchParams) -> Fields:
    """The same of a beam search."""
    return {
        "sampling": {"max_tokens": params.max_tokens},
        "n": params.beam_width,
        "ignore_eos": params.ignore_eos,
        "beam_search": {
            "width": params.beam_width,
            "length_penalty": params.length_penalty,
            "early_stopping": params.early_stopping,
        },
    }
