"""Which tokens a request may choose, out of everything that it says of them: checked at admission.

It does not know requests in flight, nor what a grammar is made of.
"""

from __future__ import annotations

from typing import NamedTuple

from engine_service.core.checks import check_token_ids
from engine_service.core.constraint import Constraint, Grammars, Vocabulary, to_bits
from engine_service.core.params import ConstraintSpec, ResolvedSampling, SamplingParams
from tidemill.runtime.errors import InvalidRequest

MAX_BAD_WORDS = 1000


class Choosable(NamedTuple):
    """`mask` holds wherever something is decided, `constraint` says for every token anew. Neither:
    everything may be chosen."""

    mask: bytes | None
    constraint: Constraint | None


def choosable(
    asked: SamplingParams,
    spec: ConstraintSpec | None,
    sampling: ResolvedSampling,
    vocabulary: Vocabulary,
    *,
    ends: frozenset[int],
    grammars: Grammars,
) -> Choosable:
    """What the request may choose; `ends` are the model's own stop tokens.

    Raises InvalidRequest for lists that leave nothing and for a grammar that does not compile.
    """
    _check(asked, vocabulary.size)
    sequences = _sequences(asked)
    allowed = _allowed(asked, vocabulary)
    if spec is None and not sequences:
        if allowed is None:
            return Choosable(None, None)
        if not allowed & ~to_bits(sampling.suppress):
            raise _nothing_left(asked, "min_tokens")
        return Choosable(vocabulary.mask(allowed), None)
    constraint = Constraint(
        vocabulary,
        matcher=None if spec is None else grammars.open(spec),
        allowed=allowed,
        sequences=sequences,
        hidden=to_bits(ends) if asked.ignore_eos and spec is not None else 0,
        hidden_first=to_bits(sampling.suppress),
        min_tokens=sampling.min_tokens,
    )
    return Choosable(None, constraint)


def is_asked(asked: SamplingParams, spec: ConstraintSpec | None) -> str:
    """The field that restricts what may be chosen; empty: none does."""
    if spec is not None:
        return f"constraint.{spec.kind}"
    return "allowed_token_ids" if asked.allowed_token_ids else "bad_words" * bool(asked.bad_words)


def is_stepwise(asked: SamplingParams, spec: ConstraintSpec | None) -> bool:
    """Whether what may be chosen depends on what was."""
    return spec is not None or bool(_sequences(asked))


def _sequences(asked: SamplingParams) -> list[tuple[int, ...]]:
    """Bad words of several tokens, but for those that a bad word of one token rules out."""
    single = {one[0] for one in asked.bad_words if len(one) == 1}
    return [one for one in asked.bad_words if len(one) > 1 and single.isdisjoint(one)]


def _check(asked: SamplingParams, vocab_size: int) -> None:
    check_token_ids("allowed_token_ids", asked.allowed_token_ids, vocab_size)
    if len(asked.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(asked.bad_words)} entries; at most {MAX_BAD_WORDS} are allowed.",
            param="bad_words",
        )
    for word in asked.bad_words:
        if not word:
            raise InvalidRequest(
                "A bad word is empty; it needs at least one token.", param="bad_words"
            )
        check_token_ids("bad_words", word, vocab_size)


def _allowed(asked: SamplingParams, vocabulary: Vocabulary) -> int | None:
    """The ids that no list forbids, as bits; None where no list says anything of single ids."""
    single = [one[0] for one in asked.bad_words if len(one) == 1]
    if not (asked.allowed_token_ids or single):
        return None
    allowed = vocabulary.all_ids
    if asked.allowed_token_ids:
        allowed &= to_bits(asked.allowed_token_ids)
    allowed &= ~to_bits(single)
    if not allowed:
        raise _nothing_left(asked, "bad_words")
    return allowed


def _nothing_left(asked: SamplingParams, other: str) -> InvalidRequest:
    name = "allowed_token_ids" if asked.allowed_token_ids else "bad_words"
    return InvalidRequest(
        f"{name} leaves no token that may be chosen beside {other} and the model's own rules; "
        "allow more tokens.",
        param=name,
    )
