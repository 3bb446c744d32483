"""An executor without a model: a fixed step time, and tokens that depend on request and position.

It isolates everything above the kernels, for benchmarks and tests; no torch.
"""

from __future__ import annotations

import time
import zlib
from typing import NamedTuple

from engine_service.core.step import (
    Decision,
    Decisions,
    NewRow,
    Span,
    SteadyRows,
    StepPlan,
    TokenLogprobs,
)
from engine_service.core.strategy import ExecutorLimits

_STRIDE = 7919
_CHOICE_STRIDE = 104_729


def first_token_seed(prompt: bytes, choice: int) -> int:
    """What a sequence's tokens are made from: its prompt (packed ids) and its choice index."""
    return zlib.crc32(prompt) + choice * _CHOICE_STRIDE


class _Row(NamedTuple):
    seed: int
    prompt: list[int]
    logprobs: int | None
    prompt_logprobs: int | None
    given: dict[int, int]
    """Tokens by position that are final already: pinned ones."""
    is_plain: bool
    """Nobody asks for log-probabilities, and nothing is given."""


class Flight(NamedTuple):
    """A step on its way: what it will decide, and when it is over (monotonic seconds)."""

    decisions: Decisions
    due: float


class SimulatedExecutor:
    """Implements core.strategy.Executor. Each step takes `step_s`, one after the other like on a
    device; every wanted position is decided, and no token of `never` is produced."""

    depth = 1

    def __init__(
        self, limits: ExecutorLimits, *, vocab_size: int, step_s: float, never: frozenset[int]
    ) -> None:
        self.limits = limits
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._never = never
        self._rows: dict[int, _Row] = {}
        self._busy_until = 0.0
        self._one_final = [True]

    def launch(self, plan: StepPlan) -> Flight:
        """Returns at once."""
        self._busy_until = max(time.monotonic(), self._busy_until) + self._step_s
        for new in plan.new_rows:
            self._rows[new.row] = _row(new)
        own = [self._decide(span) for span in plan.own_spans]
        return Flight(Decisions(own, self._move_on(plan.steady)), self._busy_until)

    def collect(self, handle: Flight) -> Decisions:
        """Sleeps until the step is over."""
        left = handle.due - time.monotonic()
        if left > 0:
            time.sleep(left)
        return handle.decisions

    def token(self, seed: int, position: int) -> int:
        """The token that the sequence with this seed has at an absolute position."""
        token = (seed + position * _STRIDE) % self._vocab_size
        while token in self._never:
            token = (token + 1) % self._vocab_size
        return token

    def _move_on(self, steady: SteadyRows | None) -> list[int]:
        """The tokens of rows that nobody watches, as columns."""
        if steady is None:
            return []
        rows, token, shift = self._rows, self.token, steady.shift
        pairs = zip(steady.rows, steady.offsets, strict=True)
        return [token(rows[row].seed, offset + shift) for row, offset in pairs]

    def _decide(self, span: Span) -> Decision | None:
        number, _, _, _, _, first, last, score_start, score_stop, _, _, _, _ = span
        row = self._rows[number]
        if last - first == 1 and row.is_plain:
            return Decision([self.token(row.seed, first)], self._one_final)
        if first == last and score_start == score_stop:
            return None
        tokens = [
            row.given[position] if position in row.given else self.token(row.seed, position)
            for position in range(first, last)
        ]
        logprobs: list[TokenLogprobs | None] | None = None
        if row.logprobs is not None:
            logprobs = [self._entry(token, row.logprobs) for token in tokens]
        scores = None
        if row.prompt_logprobs is not None:
            known = row.prompt[score_start:score_stop]
            scores = [self._entry(token, row.prompt_logprobs) for token in known]
        return Decision(tokens, [True] * len(tokens), logprobs, scores)

    def _entry(self, token: int, num_more: int) -> TokenLogprobs:
        """The token with probability one half, the next ids with halving shares behind it."""
        ids = tuple((token + i) % self._vocab_size for i in (0, *range(num_more)))
        shares = (-0.6931472, *(-0.6931472 * (i + 1) for i in range(num_more)))
        return TokenLogprobs(ids, shares, 1)


def _row(new: NewRow) -> _Row:
    prompt = new.token_ids[: new.prompt_len]
    packed = b"".join([token.to_bytes(4, "little") for token in prompt])
    sampling = new.sampling
    tail = zip(new.canvas.token_ids, new.canvas.fixed, strict=True)
    given = {at: token for at, (token, fixed) in enumerate(tail, len(new.token_ids)) if fixed}
    given |= dict(new.pinned)
    return _Row(
        seed=first_token_seed(packed, sampling.choice),
        prompt=prompt if sampling.prompt_logprobs is not None else [],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        given=given,
        is_plain=sampling.logprobs is None and sampling.prompt_logprobs is None and not given,
    )
