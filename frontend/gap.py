"""The gap between a prompt and a suffix, which the engine fills: its length, and what is behind it.

It does not know the engine's messages: a suffix becomes tokens pinned at absolute positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from frontend.messages import EngineFacts
from frontend.request import Options, TextRequest
from frontend.validation import fit
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint

MAX_SUFFIX_TOKENS = 4096
"""Most tokens that an engine takes behind a gap."""


class Gap(NamedTuple):
    """`num_tokens` to be generated between the prompt and `suffix_ids`."""

    num_tokens: int
    suffix_ids: list[int]

    def pinned(self, prompt_len: int) -> tuple[tuple[int, int], ...]:
        """(position, token id) of the suffix behind a prompt of this length."""
        return tuple(enumerate(self.suffix_ids, prompt_len + self.num_tokens))


def check_gap(request: TextRequest, facts: EngineFacts) -> None:
    """Raises Unsupported for a model without masks, and InvalidRequest for an empty gap, or one
    that is shorter than the answer has to be."""
    if facts.mask_token_id is None:
        raise Unsupported(
            "suffix needs a diffusion model, which can fill the gap in front of it; this engine's "
            f"model knows {', '.join(facts.methods)} only: leave it out",
            param="suffix",
        )
    max_tokens, least = request.options.sampling.max_tokens, request.options.sampling.min_tokens
    if max_tokens is not None and least is not None and least > max_tokens > 0:
        # The engine is told of the suffix too, and would take as much for the answer's length.
        name = request.called("min_tokens")
        raise InvalidRequest(
            f"{name} is {least}; it must be a whole number in [0, {max_tokens}], the length of "
            "the gap.",
            param=name,
        )
    if max_tokens == 0:
        name = request.called("max_tokens")
        raise InvalidRequest(
            f"{name} is 0, and suffix needs a gap to be filled; {name} is the length of the gap: "
            "set it to 1 or more",
            param=name,
        )


def check_suffix_ids(token_ids: list[int]) -> None:
    """Raises InvalidRequest for a suffix without tokens, or with more than allowed."""
    if not token_ids:
        raise InvalidRequest(
            "suffix has no tokens in this vocabulary: leave it out", param="suffix"
        )
    check_suffix_len(len(token_ids))


def check_suffix_len(num_tokens: int) -> None:
    """Raises InvalidRequest for a suffix that has `num_tokens` or more, if these are too many."""
    if num_tokens > MAX_SUFFIX_TOKENS:
        raise InvalidRequest(
            f"suffix has {num_tokens} tokens or more; it may have {MAX_SUFFIX_TOKENS}: shorten it",
            param="suffix",
        )


def fit_prompt(
    token_ids: list[int],
    suffix_ids: list[int],
    options: Options,
    facts: EngineFacts,
    *,
    param: str,
    is_default: bool,
) -> tuple[list[int], int | None, Gap | None]:
    """The prompt's ids, max_tokens and the gap within the context, as validation.fit has them.

    A suffix is never cut. Raises InvalidRequest context_length_exceeded.
    """
    if not suffix_ids:
        return *fit(token_ids, options, facts, param=param, is_default=is_default), None
    length = options.sampling.max_tokens
    assert length is not None, "only chats have an open length, and they have no suffix"
    num_kept = len(token_ids) if options.truncate_prompt_tokens is None else 1
    num_filled = 1 if is_default else length
    total, limit = num_kept + num_filled + len(suffix_ids), facts.max_model_len
    if total > limit:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{total} tokens ({num_kept} in the {param}, {num_filled} in the gap, "
            f"{len(suffix_ids)} in the suffix). Please reduce the length of one of them.",
            reason="CONTEXT_LENGTH_EXCEEDED",
            param=param,
            facts={"n_prompt_tokens": str(num_kept), "n_ctx": str(limit)},
        )
    sampling = replace(options.sampling, max_tokens=length + len(suffix_ids))
    whole = replace(options, sampling=sampling)
    fitted, max_tokens = fit(token_ids, whole, facts, param=param, is_default=is_default)
    assert max_tokens is not None, "a gap has a length"
    return fitted, max_tokens, Gap(max_tokens - len(suffix_ids), suffix_ids)


def of_suffix(refused: Unsupported, constraint: Constraint | None = None) -> Unsupported:
    """The engine's refusal of pinned tokens, for a client who asked for a suffix."""
    message = refused.message.replace("pinned or ", "suffix or ")
    if constraint is not None:
        message = message.replace(f"constraint.{constraint.kind}", constraint.param)
    return Unsupported(f"suffix cannot be filled up to: {message}", param="suffix")
