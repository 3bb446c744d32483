"""What only a frontend can check: prompts against the context, stop strings, echo, n.

It does not check sampling values: the engine's admission is the one authority on those, so that
callers that speak token ids get the same answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from frontend.beam_rules import check_beam
from frontend.messages import EngineFacts
from frontend.request import Chat, Options, TextRequest
from tidemill.nesting import is_too_deep
from tidemill.runtime.errors import InvalidRequest, Unsupported

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024
MAX_SALT_CHARS = 1024
MAX_KNOB_DEPTH = 8
"""Objects and lists inside of each other. protobuf reads some 45 of them, and an engine that cannot
read a message gives up the whole session, with all other requests in it."""
DEFAULT_COMPLETION_TOKENS = 16
Ids = TypeVar("Ids", list[int], tuple[int, ...])


def check_request(request: TextRequest, facts: EngineFacts, max_n: int) -> None:
    """Raises InvalidRequest naming the parameter, and Unsupported for encoders."""
    options = request.options
    if not facts.methods:
        raise Unsupported(
            "this model is an encoder and generates no text; use it with /v1/embeddings, "
            "/v1/score or /v1/rerank",
            reason="NOT_A_GENERATOR",
            param="model",
        )
    _check_counts(request, max_n)
    if len(options.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(options.cache_salt)} characters; it may have {MAX_SALT_CHARS}",
            param="cache_salt",
        )
    _check_knobs(options)
    if options.beam is not None:
        check_beam(request, options.beam, facts, max_n)
    _check_stops(options)
    _check_max_tokens(request)
    check_truncation(options)
    check_ids("stop_token_ids", options.stop_token_ids, facts.vocab_size)
    check_ids("logit_bias", options.sampling.logit_bias, facts.vocab_size)
    check_ids("allowed_token_ids", options.sampling.allowed_token_ids, facts.vocab_size)
    for name, count in (
        (request.logprobs_param, options.logprobs),
        ("prompt_logprobs", options.prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= facts.max_logprobs:
            raise InvalidRequest(
                f"{name} is {count}; it must lie in 0..{facts.max_logprobs}", param=name
            )
    for prompt in request.prompts:
        if isinstance(prompt, tuple):
            kept = truncated(prompt, options, facts.max_model_len)
            check_size(len(kept), request, facts.max_model_len)  # ahead of a look at each of them
            check_ids(request.prompt_param, kept, facts.vocab_size)
        if prompt in ("", ()):
            raise InvalidRequest(
                f"{request.prompt_param} is empty; it needs at least one token",
                param=request.prompt_param,
            )


def fit(
    token_ids: list[int], options: Options, facts: EngineFacts, *, param: str, is_default: bool
) -> tuple[list[int], int | None]:
    """The prompt's ids and max_tokens within the context; `truncation_side` is what is cut.

    `max_tokens` None means: the room left. With `is_default` it is our own choice and shrinks to
    the room; what the client asked for must fit. Raises InvalidRequest context_length_exceeded.
    """
    limit, max_tokens = facts.max_model_len, options.sampling.max_tokens
    token_ids = truncated(token_ids, options, limit)
    if not token_ids:
        raise InvalidRequest(f"{param} is empty; it needs at least one token", param=param)
    if is_default and max_tokens is not None:
        max_tokens = max(1, min(max_tokens, limit - len(token_ids)))
    asked = 1 if max_tokens is None else max_tokens
    if len(token_ids) + max(1, asked) > limit:
        raise context_exceeded(param, len(token_ids), asked, limit)
    return token_ids, max_tokens


def check_size(num_tokens: int, request: TextRequest, limit: int, *, is_exact: bool = True) -> None:
    """Raises InvalidRequest for a prompt of so many tokens, which no answer fits behind."""
    if num_tokens >= limit:
        max_tokens = request.options.sampling.max_tokens
        asked = 1 if max_tokens is None else max_tokens
        raise context_exceeded(request.prompt_param, num_tokens, asked, limit, is_exact=is_exact)


def truncated(token_ids: Ids, options: Options, limit: int) -> Ids:
    """What `truncate_prompt_tokens` leaves of a prompt in a context of `limit` tokens."""
    keep = options.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:  # one token stays even where there is no room, and is refused later
        keep = max(1, limit - max(1, options.sampling.max_tokens or 1))
    return token_ids[:keep] if options.truncation_side == "right" else token_ids[-keep:]


def check_streamed(options: Options) -> None:
    """Raises InvalidRequest for what a stream cannot tell."""
    if options.beam is not None:
        raise InvalidRequest(
            "the beams of a search are known when all have ended, which cannot be streamed; set "
            "stream to false, or leave beam search out",
            param="stream",
        )
    if options.ranks:
        raise InvalidRequest(
            f"best_of is {options.best_of} and n is {options.n}: the likeliest sequences are known "
            "when all have ended, which cannot be streamed; set stream to false, or best_of to n",
            param="best_of",
        )


def context_exceeded(
    param: str, num_tokens: int, asked: int, limit: int, *, is_exact: bool = True
) -> InvalidRequest:
    """The error in OpenAI's words, which clients look for; `asked` is the completion's length.

    0 asks for the prompt's scores only, which costs one position more (see CompletionBody.echo).
    """
    least = "" if is_exact else "at least "
    if num_tokens == limit and asked == 0:
        what = (
            f"your {param} resulted in {least}{num_tokens} tokens, and to score them (max_tokens "
            "0) the engine computes one token more, which is not shown"
        )
        advice = f"the {param} to {limit - 1} tokens, or use truncate_prompt_tokens"
    elif num_tokens >= limit:
        what = f"your {param} resulted in {least}{num_tokens} tokens"
        advice = f"the {param}"
    else:
        what = (
            f"you requested {num_tokens + asked} tokens ({num_tokens} in the {param}, {asked} in "
            "the completion)"
        )
        advice = f"the {param} or completion"
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. However, {what}. "
        f"Please reduce the length of {advice}.",
        reason="CONTEXT_LENGTH_EXCEEDED",
        param=param,
        facts={
            "n_prompt_tokens": str(num_tokens),
            "n_completion_tokens": str(asked),
            "n_ctx": str(limit),
        },
    )


def _check_counts(request: TextRequest, max_n: int) -> None:
    options = request.options
    if not 1 <= options.n <= max_n:
        raise InvalidRequest(f"n is {options.n}; it must lie in 1..{max_n}", param="n")
    if not 1 <= len(request.prompts) <= MAX_PROMPTS:
        raise InvalidRequest(
            f"there are {len(request.prompts)} prompts; send 1 to {MAX_PROMPTS} in one request",
            param=request.prompt_param,
        )
    if not options.n <= options.width <= max_n:
        raise InvalidRequest(
            f"best_of is {options.best_of} and n is {options.n}; best_of must lie in "
            f"{options.n}..{max_n}: the n likeliest of best_of sequences are returned",
            param="best_of",
        )
    num_sequences = options.width * len(request.prompts)
    if num_sequences > MAX_SEQUENCES:
        name = "best_of" if options.ranks else "n"
        raise InvalidRequest(
            f"{name} is {options.width} for each of {len(request.prompts)} prompts, "
            f"{num_sequences} sequences together; one request may have {MAX_SEQUENCES}: "
            "send several",
            param=name,
        )


def _check_knobs(options: Options) -> None:
    """Only what cannot travel: everything else about knobs the engine knows."""
    for name, value in options.decoding.params.items():
        if isinstance(value, dict | list) and is_too_deep(value, MAX_KNOB_DEPTH):
            raise InvalidRequest(
                f"decoding.params.{name} has more than {MAX_KNOB_DEPTH} objects and lists inside "
                "of each other; nest it less deeply",
                param=f"decoding.params.{name}",
            )


def _check_stops(options: Options) -> None:
    if len(options.stop) > MAX_STOPS:
        raise InvalidRequest(
            f"stop has {len(options.stop)} strings; at most {MAX_STOPS} are allowed", param="stop"
        )
    check_stop_lengths(options.stop)


def check_stop_lengths(stops: Iterable[str]) -> None:
    """Raises InvalidRequest: an empty one would end any text at once."""
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARS}",
                param="stop",
            )


def _check_max_tokens(request: TextRequest) -> None:
    max_tokens, least = request.options.sampling.max_tokens, 0 if request.options.echo else 1
    if max_tokens is None or max_tokens >= least:
        return
    name, hint = request.called("max_tokens"), ""
    if any(isinstance(prompt, Chat) for prompt in request.prompts):
        hint = ", or left out, so that the answer may fill the context"
    elif least:
        hint = " (0 only scores the prompt: then set echo to true)"
    raise InvalidRequest(f"{name} is {max_tokens}; it must be at least {least}{hint}", param=name)


def check_truncation(options: Options) -> None:
    """Raises InvalidRequest naming what of it cannot be."""
    keep, side = options.truncate_prompt_tokens, options.truncation_side
    if keep is not None and keep < 1 and keep != -1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {keep}; it must be at least 1, or -1 for what the context "
            "leaves beside the answer",
            param="truncate_prompt_tokens",
        )
    if side not in ("left", "right"):
        raise InvalidRequest(
            f"truncation_side is {side[:40]!r}; it must be left or right", param="truncation_side"
        )
    if side == "right" and keep is None:
        raise InvalidRequest(
            "truncation_side is 'right' and nothing is truncated: set truncate_prompt_tokens, or "
            "leave it out",
            param="truncation_side",
        )


def check_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id outside of the vocabulary."""
    wrong = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"{param} holds token id {wrong}; ids of this model are in [0, {vocab_size})",
            reason="TOKEN_ID_OUT_OF_RANGE",
            param=param,
        )
