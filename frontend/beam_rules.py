"""What a beam search can be asked for. It does not know how one is done."""

from __future__ import annotations

import math

from frontend.beam_search import num_candidates
from frontend.messages import EngineFacts
from frontend.request import Beam, Options, TextRequest
from tidemill.runtime.errors import InvalidRequest, Unsupported

_METHOD = "autoregressive"
MAX_PENALTY = 100.0


def stop_ids(options: Options, facts: EngineFacts) -> frozenset[int]:
    """The tokens that end a beam."""
    own = () if options.ignore_eos else facts.eos_token_ids
    return frozenset((*own, *options.stop_token_ids))


def check_beam(request: TextRequest, beam: Beam, facts: EngineFacts, max_n: int) -> None:
    """Raises InvalidRequest naming the parameter, Unsupported for models that decide otherwise."""
    options = request.options
    if (options.decoding.method or facts.default_method) != _METHOD:
        raise Unsupported(
            "beam search scores one token after the other, which this model's method does not; "
            "leave it out",
            param="use_beam_search",
        )
    if not options.n <= beam.width <= max_n:
        raise InvalidRequest(
            f"beam search has {beam.width} beams and n is {options.n}; there may be "
            f"{options.n}..{max_n} beams",
            param="best_of",
        )
    needed = num_candidates(beam, stop_ids(options, facts))
    if needed > facts.max_logprobs:
        raise InvalidRequest(
            f"{beam.width} beams need the {needed} likeliest continuations of each; this engine "
            f"gives {facts.max_logprobs} (--max-logprobs): ask for fewer beams",
            param="best_of",
        )
    if not math.isfinite(beam.length_penalty) or abs(beam.length_penalty) > MAX_PENALTY:
        raise InvalidRequest(
            f"length_penalty is {beam.length_penalty}; it must lie in "
            f"-{MAX_PENALTY:g}..{MAX_PENALTY:g}",
            param="length_penalty",
        )
    for name in _ignored(options):
        raise no_part(name)


def no_part(name: str) -> InvalidRequest:
    """What a search cannot be asked for beside."""
    return InvalidRequest(
        f"{name} has no part in a beam search, which compares the model's own probabilities; "
        "leave it out",
        param=name,
    )


def _ignored(options: Options) -> list[str]:
    """Parameters that would change what is decided, and do not here."""
    sampling = options.sampling
    asked: dict[str, object] = {
        "repetition_penalty": sampling.repetition_penalty not in (None, 1.0),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": sampling.logit_bias,
        "min_tokens": sampling.min_tokens,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": sampling.bad_words or options.bad_words,
        "response_format": options.constraint,
        "prompt_logprobs": options.prompt_logprobs is not None,
        "best_of": options.best_of is not None,
        "stop": options.stop,
    }
    return [name for name, value in asked.items() if value]
