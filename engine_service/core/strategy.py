"""What the core asks of others: a decoding strategy and an executor.

The core owns these interfaces; `decoding/` implements the first, `worker/` the second.
A strategy has a host half (pure, used by the scheduler) and a device half (used by the runner);
neither the scheduler nor the runner knows a method's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from engine_service.core.step import Canvas, Decision, Decisions, NewRow, Span, StepPlan, Update

NO_BOUND = 1 << 62
"""More tokens than any step has."""


class View(NamedTuple):
    """The frozen picture of a request that a strategy plans from."""

    row: int
    prompt_len: int
    committed_len: int
    num_cached: int
    canvas: Canvas
    params: Any
    score_from: int
    """First prompt position still to be scored; prompt_len when nothing is to be scored."""


class Needs(NamedTuple):
    """What a request takes at least: budgets of a step that always make progress, and room."""

    tokens: int
    """Query tokens of one step."""
    logits: int
    """Positions that one span decides on."""
    positions: int
    """Positions of KV at its longest."""


@dataclass(slots=True)
class Budget:
    """What is left of the step: query tokens, of them those of whole canvases, rows of logits, and
    rows that do something.
    The last whole canvas may overdraw its share: one always makes progress. StepDraft counts it
    down; a tuple made anew for every row would cost a tenth of the scheduler's time at 256 rows.
    """

    tokens: int
    logits: int
    canvases: int = NO_BOUND
    rows: int = NO_BOUND

    def allows(self, span: Span) -> bool:
        """Whether the span fits into what is left."""
        if span.num_tokens > self.tokens or span.num_decided > self.logits or self.rows < 1:
            return False
        return self.canvases > 0 or not span.is_whole


class KeyChoice(NamedTuple):
    """What keys are chosen by: how much the queries of a hole attend to those outside of it.

    `by_head` ranks them for every key-value head by itself; scores are max-pooled over `pool`
    neighbours, an odd number.
    """

    hole_start: int
    hole_stop: int
    by_head: bool
    pool: int


class DecodeStrategy(ABC):
    """One decoding method.

    Class attributes: `name`; `Params`, the MethodParams of per-request knobs (parsed once at
    admission); `supports`, the capabilities of {"penalties", "logprobs", "prompt_logprobs",
    "min_tokens", "logit_bias", "canvas", "pinned", "constraint"} that requests may ask for.
    "pinned" says that fixed positions of a canvas are never decided anew, and needs "min_tokens".
    "constraint" says that `constrained` is there.
    """

    name: ClassVar[str]
    Params: ClassVar[type]
    supports: ClassVar[frozenset[str]]
    mask_block: int
    """Granularity of attention and of the prefix cache; 1 is causal."""
    max_decide: int
    """Most positions one span of this method decides on."""
    min_tokens_per_step: int
    """Smallest budget with which `plan` always makes progress."""
    mask_token_id: int | None = None
    """What an open position of a canvas holds as long as nothing is known of it."""
    default_max_tokens: ClassVar[int | None] = None
    """Output length of requests that ask for none; None: what the context holds."""
    approximate_caches: ClassVar[tuple[str, ...]] = ()
    """Values of the knob `cache` under which answers are approximations."""
    append_only: ClassVar[bool] = False
    """What a span decides is committed whole, its KV is final and there is no canvas: `settle` says
    Update(decision.token_ids, decision.logprobs, span.stop, canvas), and `advance` never None.
    The core relies on it to skip both questions for most tokens: `settle` is asked where a run may
    end the request or fills a unit of pages.
    """

    @classmethod
    @abstractmethod
    def for_model(
        cls,
        *,
        mask_block: int,
        mask_token_id: int | None,
        logits_shift: int,
        eos_token_ids: tuple[int, ...] = (),
        eot_token_ids: tuple[int, ...] = (),
    ) -> DecodeStrategy:
        """The method as a model with these traits runs it; raises Unsupported if it cannot."""

    @abstractmethod
    def parse(self, knobs: dict[str, Any]) -> Any:
        """Checks raw knobs; raises InvalidRequest naming the unknown or wrong one."""

    def with_defaults(self, defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
        """A request's knobs over the engine's default ones, but those that mean nothing to it."""
        return {**defaults, **asked}

    def constrained(self, params: Any, asked: dict[str, Any]) -> Any:
        """The knobs under which one token is committed at a time, from the left: what may follow
        depends on it. Raises InvalidRequest naming a knob of those `asked` that says otherwise."""
        return params

    def needs(self, prompt_len: int, max_len: int, params: Any) -> Needs:
        """What a request of at most `max_len` tokens takes; raises InvalidRequest for knobs that
        do not go with its length."""
        positions = -(-max_len // self.mask_block) * self.mask_block
        return Needs(self.min_tokens_per_step, self.max_decide, positions)

    @abstractmethod
    def begin(self, committed_len: int, params: Any, max_len: int) -> Canvas:
        """The tail a request starts with, which may grow up to `max_len` tokens."""

    def restart(self, view: View) -> tuple[int, Canvas]:
        """How many committed tokens, and which tail, a preempted request starts again with.

        Tokens that it gives up must come out as they were when they are decided again: they have
        been told, and are not told twice. The default gives up nothing.
        """
        return view.committed_len, view.canvas

    @abstractmethod
    def max_cached(self, committed_len: int) -> int:
        """How many leading positions may be taken from the prefix cache."""

    def plan(self, view: View, budget: Budget) -> Span | None:
        """The next span, or None when the budget does not allow progress. Pure.

        The default fits every method that caches what it commits: catch up with what is committed
        but not cached, then decide on the tail; a cut falls on a border of `mask_block`.
        """
        row, prompt_len, committed_len, start, canvas, _, score_from = view
        block = self.mask_block
        end = committed_len + len(canvas.token_ids)
        room = budget.tokens // block * block
        stop = end if end - start <= room else start + room
        if score_from < prompt_len:
            return self._plan_scored(view, budget, stop)
        if stop == end > start:
            decide_start, decide_stop = self.undecided(committed_len, canvas)
            if decide_stop - decide_start <= budget.logits:
                return Span(row, start, stop, stop, block, decide_start, decide_stop)
            stop -= block
        if stop <= start:
            return None
        return Span(row, start, stop, stop, block, stop, stop)

    @staticmethod
    def undecided(committed_len: int, canvas: Canvas) -> tuple[int, int]:
        """Positions [start, stop) that the span reaching the end of the row decides on.

        From the first to the last open position of the canvas; the next token without a canvas,
        and the last position of one without an open position (all of it is pinned).
        """
        fixed = canvas.fixed
        if False not in fixed:
            last = committed_len + max(0, len(fixed) - 1)
            return last, last + 1
        first = fixed.index(False)
        last = len(fixed) - 1
        while fixed[last]:
            last -= 1
        return committed_len + first, committed_len + last + 1

    def _plan_scored(self, view: View, budget: Budget, stop: int) -> Span | None:
        """A span of a causal prompt whose tokens are scored: token p from query p - 1."""
        assert self.mask_block == 1, "prompt log-probabilities are defined for causal methods"
        start, end = view.num_cached, view.committed_len
        score_start = max(view.score_from, start + 1)
        if stop == end and budget.logits < 1:
            stop -= 1
        if stop <= start:
            return None
        score_stop = max(score_start, min(view.prompt_len, stop + 1))
        decide_start = end if stop == end else stop
        decide_stop = end + 1 if stop == end else stop
        return Span(
            view.row, start, stop, stop, 1, decide_start, decide_stop, score_start, score_stop
        )

    def room(self, view: View) -> int:
        """Positions of KV that all there is to compute now takes: so many are found before a
        request starts, or it waits."""
        return view.committed_len + len(view.canvas.token_ids)

    def advance(self, span: Span) -> Span | None:
        """The span that follows `span`, which decides something, whatever that will be. Pure.

        None: that depends on the decision. Then the request sits out the steps until it is
        collected, and `plan` says what follows. Must equal what `plan` would say without limits.
        """
        return None

    def foresee(self, view: View, span: Span, *, may_err: bool) -> View | None:
        """What the next span may be planned from while `span`, which decides something, is on its
        way; `view` is what is settled. Pure.

        None: the row sits out the steps until `span` is collected. With `may_err` the picture may
        turn out wrong (`span` opens nothing more, or more than was thought), as long as the span
        that is planned from it computes what is right whatever `span` decides.
        """
        return None

    @abstractmethod
    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        """Turns a decision into an update. Pure; `committed_len` and `canvas` are the request's
        before it: as they were when the span was planned or, where that was foreseen, with what the
        span ahead of it decided."""

    def choice_of(self, span: Span) -> KeyChoice:
        """How a span aside chooses the `kept` keys. Of the device half: `admit` knew the row."""
        raise NotImplementedError(f"{self.name} keeps no choice of keys")

    def guide(self, logits_NV: Any, unguided_NV: Any, rows: Any) -> Any:
        """[N, V] out of the logits of both copies of a canvas. Device half."""
        raise NotImplementedError(f"{self.name} computes no second copy")

    @abstractmethod
    def bind(self, max_rows: int, device: Any) -> None:
        """Device half: allocates the method's own per-row tables."""

    @abstractmethod
    def admit(self, rows: list[NewRow]) -> None:
        """Device half: writes the method's tables for rows that are taken or taken again."""

    @abstractmethod
    def decide(self, batch: Any) -> Any:
        """Device half: DecideBatch to DecideResult (sampling/batch.py).

        Writes the chosen tokens and fixed bits into the device tables. No synchronisation.
        """


class ExecutorLimits(NamedTuple):
    """What an executor found out at start-up."""

    num_pages: int
    page_size: int
    max_rows: int
    max_model_len: int


class Executor(Protocol):
    """Runs step plans. `launch` returns at once; `collect` waits for that step's decisions."""

    limits: ExecutorLimits
    depth: int
    """Steps that may be launched before the oldest one is collected: 0 where a step runs while it
    is launched, 1 where it runs beside the host, more where it runs in stages."""

    def launch(self, plan: StepPlan) -> Any:
        """Starts a step and returns a handle for `collect`."""

    def collect(self, handle: Any) -> Decisions:
        """What the step decided, once it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What admission must know of the model."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    weight_version: str
    mask_token_id: int | None = None
