"""Beam search over scored continuations. It does not know where scores come from.

The algorithm is that of transformers' `generate(num_beams=...)`, token for token. Of all
continuations of the running beams the likeliest are looked at, with one stop token twice as many as
there are beams. Those among the first `width` that end are finished, and the likeliest `width` of
the others run on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from frontend.messages import TokenLogprobs
from frontend.request import Beam


class Hypothesis(NamedTuple):
    """Tokens behind a prompt, an entry of scores for each, and their log-probabilities' sum."""

    token_ids: tuple[int, ...] = ()
    entries: tuple[TokenLogprobs, ...] = ()
    logprob: float = 0.0
    has_ended: bool = False
    """Its last token is a stop token."""

    def extended(self, scored: TokenLogprobs, index: int, ends: frozenset[int]) -> Hypothesis:
        """Goes on with alternative `index` (from 1) of `scored`."""
        token, logprob = scored.token_ids[index], scored.logprobs[index]
        # The alternatives stay; in front of them stands the token that was taken.
        ids, values = (token, *scored.token_ids[1:]), (logprob, *scored.logprobs[1:])
        entry = TokenLogprobs(ids, values, index)
        return Hypothesis(
            (*self.token_ids, token), (*self.entries, entry), self.logprob + logprob, token in ends
        )


def num_candidates(beam: Beam, ends: Iterable[int]) -> int:
    """Continuations that are looked at in each step, over all beams, and alternatives that each
    beam must be scored with."""
    return max(2, 1 + len(set(ends))) * beam.width


class BeamSearch:
    """advance until `is_done`, then `best`. One prompt; `running` is what is to be scored next."""

    def __init__(self, beam: Beam, *, ends: frozenset[int], max_tokens: int) -> None:
        self._beam = beam
        self._ends = ends
        self._max_tokens = max_tokens
        self._finished: list[tuple[float, Hypothesis]] = []
        self._num_tokens = 0
        self.running = [Hypothesis()]
        self.is_done = max_tokens < 1

    def advance(self, scored: Sequence[TokenLogprobs]) -> None:
        """Takes the alternatives of every running beam's next token, best first behind the
        first."""
        beam, width = self._beam, self._beam.width
        ranked = [
            (one.logprob + entry.logprobs[index], one, entry, index)
            for one, entry in zip(self.running, scored, strict=True)
            for index in range(1, len(entry.token_ids))
        ]
        ranked.sort(key=lambda found: -found[0])
        candidates = [  # only these: each is a copy of all tokens before it
            one.extended(entry, index, self._ends)
            for _, one, entry, index in ranked[: num_candidates(beam, self._ends)]
        ]
        self._num_tokens += 1
        is_full_length = self._num_tokens == self._max_tokens
        found = [one for one in candidates[:width] if one.has_ended or is_full_length]
        if not (beam.early_stopping and len(self._finished) == width):
            self._finished += [(self._score(one), one) for one in found]
            self._finished.sort(key=lambda pair: -pair[0])
            del self._finished[width:]
        self.running = [one for one in candidates if not one.has_ended][:width]
        self.is_done = is_full_length or not self.running or self._is_settled()

    def best(self, count: int) -> list[Hypothesis]:
        """The best ones, best first; beams that still run where fewer have finished."""
        return [*(one for _, one in self._finished), *self.running][:count]

    def _is_settled(self) -> bool:
        """Nothing that runs is expected to be better than what has finished."""
        if len(self._finished) < self._beam.width:
            return False
        return self._beam.early_stopping or self._score(self.running[0]) <= self._finished[-1][0]

    def _score(self, one: Hypothesis) -> float:
        try:
            return float(one.logprob / len(one.token_ids) ** float(self._beam.length_penalty))
        except OverflowError:  # 1,300 tokens to the power of 100
            return -0.0
        except ZeroDivisionError:
            return -math.inf
