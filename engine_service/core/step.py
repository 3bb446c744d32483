"""What one engine step consists of: small plain values that cross the core-worker border.

It does not know requests, strategies or torch; the worker does not know requests either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from engine_service.core.params import ResolvedSampling

FULL = 1 << 30
"""`mask_block` of a span that sees everything (bidirectional)."""


def granularity(mask_block: int) -> int:
    """Tokens that a model computes together at least; 1 where every position sees everything:
    what is computed of such a model has any length."""
    return 1 if mask_block >= FULL else mask_block


class Span(NamedTuple):
    """What one row computes in one step. All positions are absolute.

    Query position p sees keys < min(kv_len, (p // mask_block + 1) * mask_block).
    Logits are wanted for the tokens at [decide_start, decide_stop) (empty: nothing is decided)
    and for the known tokens at [score_start, score_stop) (prompt log-probabilities). Keys and
    values ahead of `store_from` are in the pages, others may read them: they are not stored again.

    A span `aside` sees its own tokens alone, all of them, and stores them nowhere; `kv_len` is what
    the row's pages are to hold. `kept` counts keys that were chosen out of the whole canvas: a span
    aside chooses them anew and puts them into the row's first slots, another finds them there and
    stores its own behind them, so that its queries see the kv_len first slots. Aside of the pages
    there may be a second copy of the canvas, in which the prompt is masked: classifier-free
    guidance wants the logits of both.
    """

    row: int
    start: int
    stop: int
    kv_len: int
    mask_block: int
    decide_start: int
    decide_stop: int
    score_start: int = 0
    score_stop: int = 0
    store_from: int = 0
    kept: int = 0
    aside: int = 0
    """Copies of the canvas aside of the pages: 0, 1 or 2."""
    num_fixed: int = 0
    """Of the decided positions, those that are final already, at least: the row's tables say which,
    and nobody needs their logits."""

    @property
    def num_tokens(self) -> int:
        """Query tokens, those of both copies."""
        return (self.stop - self.start) * (self.aside or 1)

    @property
    def is_whole(self) -> bool:
        """Whether it computes a whole canvas."""
        return self.mask_block >= FULL and self.start == 0

    @property
    def num_decided(self) -> int:
        return self.decide_stop - self.decide_start


new_span: Callable[[tuple[int, ...]], Span] = partial(tuple.__new__, Span)
"""A Span from all its fields, for those who make hundreds a step: 0.15 instead of 0.4 us each."""


def steady_span(row: int, position: int) -> Span:
    """The commonest span: it computes the token ahead of `position` and decides the one there."""
    start, stop, decided = position - 1, position, position + 1
    return new_span((row, start, stop, stop, 1, position, decided, 0, 0, 0, 0, 0, 0))


class SteadyRows(NamedTuple):
    """Rows with a steady span, in columns: row i decides position offsets[i] + shift."""

    rows: list[int]
    offsets: list[int]
    shift: int

    def span(self, index: int) -> Span:
        """What one of the rows does."""
        return steady_span(self.rows[index], self.offsets[index] + self.shift)


class TokenLogprobs(NamedTuple):
    """One position: the chosen (or given) token first, then the alternatives, best first.

    `rank` of the chosen token counts from 1 (most likely).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class Canvas(NamedTuple):
    """The tentative tail of a request, starting at its committed length.

    `fixed[i]` says that position i is decided (never inferred from the token's value);
    `step` counts the decisions taken in the current block; `logprobs` is None or one entry per
    position, filled when the position was revealed; `confidence` is None for requests that nobody
    watches, else the probability that the last step gave to every position's token.
    """

    token_ids: tuple[int, ...] = ()
    fixed: tuple[bool, ...] = ()
    step: int = 0
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    confidence: tuple[float, ...] | None = None

    def watched(self) -> Canvas:
        """With confidences: before a step, 1 where a token was given and 0 where there is none."""
        if self.confidence is not None:
            return self
        return self._replace(confidence=tuple(map(float, self.fixed)))


EMPTY_CANVAS = Canvas()


class NewRow(NamedTuple):
    """A request takes (or takes again, after preemption) a row of the device tables.

    `token_ids` are the committed tokens; `canvas` follows them. `pinned` are tokens behind the
    canvas that are final already, as (position, token id).
    """

    row: int
    token_ids: list[int]
    prompt_len: int
    canvas: Canvas
    method: str
    params: Any
    """A MethodParams of its method's own."""
    sampling: ResolvedSampling
    pinned: tuple[tuple[int, int], ...] = ()
    mask: bytes | None = None
    """Ids that may be chosen wherever the row decides (core/constraint.py); None: all."""


class RowMask(NamedTuple):
    """Ids that may be chosen where the row decides now; it stays until there is another."""

    row: int
    mask: bytes


class PageAppend(NamedTuple):
    """Row's page table grows: entries from `index` on are `pages`."""

    row: int
    index: int  # type: ignore[assignment]  # tuple.index is nobody's need here
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything a worker needs for one step. Deltas first, then the spans to run: those that say
    what they do, and behind them, as columns, the rows that do what most rows do."""

    seq: int
    new_rows: tuple[NewRow, ...]
    page_appends: tuple[PageAppend, ...]
    own_spans: tuple[Span, ...]
    steady: SteadyRows | None = None
    masks: tuple[RowMask, ...] = ()
    is_timed: bool = False
    """Whether ranks that only follow tell how long they took."""
    settled: int = 0
    """Steps up to this number were collected when this one was planned: whatever they decided is
    known to whoever launches it."""

    @property
    def num_spans(self) -> int:
        return len(self.own_spans) + (len(self.steady.rows) if self.steady else 0)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All of them, one by one. O(rows): who has columns reads `own_spans` and `steady`."""
        steady = self.steady
        if steady is None:
            return self.own_spans
        return self.own_spans + tuple(map(steady.span, range(len(steady.rows))))


class Memory(NamedTuple):
    """Bytes of the device; the host's for a CPU. 0: not known."""

    used: int = 0
    """By everybody; without what our allocator only keeps for later."""
    total: int = 0
    peak: int = 0
    """The most that we had in use at once."""
    kv: int = 0
    """Of `used`: pages, taken and free."""


class Decision(NamedTuple):
    """What the device decided for one span, on the host.

    `token_ids[i]` and `final[i]` belong to position decide_start + i; a position that is not
    final keeps its mask, or a tentative token. `logprobs` and `scores` (of the scored prompt
    positions) are None when the request did not ask for them; `confidence` where tokens are not
    revealed by it.
    """

    token_ids: list[int]
    final: list[bool]
    logprobs: list[TokenLogprobs | None] | None = None
    scores: list[TokenLogprobs] | None = None
    confidence: list[float] | None = None
    vector: bytes | None = None
    """What a prompt was pooled into: little-endian float32."""

    def behind(self, count: int) -> Decision:
        """Without the first `count` positions."""
        return self._replace(
            token_ids=self.token_ids[count:],
            final=self.final[count:],
            logprobs=None if self.logprobs is None else self.logprobs[count:],
            confidence=None if self.confidence is None else self.confidence[count:],
        )


class Decisions(NamedTuple):
    """What a step decided: one entry for every span of its own, None where nothing was decided or
    scored, and one token for every steady row."""

    own: list[Decision | None]
    steady: list[int]

    @classmethod
    def split(cls, plan: StepPlan, decisions: Sequence[Decision | None]) -> Decisions:
        """From one decision for every span of the plan."""
        num_own = len(plan.own_spans)
        steady = [decision.token_ids[0] for decision in decisions[num_own:] if decision]
        return cls(list(decisions[:num_own]), steady)


class Update(NamedTuple):
    """What a step did to one request.

    `commit` are the tokens that became final; `canvas` is the new tail behind them;
    `num_cached` is the number of leading positions whose KV is final.
    """

    commit: list[int]
    logprobs: list[TokenLogprobs | None] | None
    num_cached: int
    canvas: Canvas
