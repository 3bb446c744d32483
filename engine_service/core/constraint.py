"""What the next token of a request may be: a grammar, and sequences of tokens that must not appear.

Masks are made on a thread while the device runs. It does not know requests, nor what a grammar is
made of. A *mask* is one bit an id in little-endian words of 32, as kernels/bitmask.py reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from engine_service.core.finish import Stop
from engine_service.core.messages import FinishReason
from engine_service.core.params import ConstraintSpec

_LOG = logging.getLogger("tidemill.rank")

PATIENCE_S = 0.001
"""How long a step is held up, while another one runs, for rows whose masks are not ready: they
would sit it out."""


class Matcher(Protocol):
    """How far one request is in its grammar."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty while it can. It stays."""

    def accept(self, token_id: int) -> None:
        """Takes in a token that the newest mask allowed."""


class Grammars(Protocol):
    """Compiles grammars and says what they allow. Called from several threads."""

    def is_compiled(self, spec: ConstraintSpec) -> bool:
        """Whether `open` returns at once."""

    def compile(self, spec: ConstraintSpec) -> None:
        """So that `open` need not; raises what it would raise."""

    def open(self, spec: ConstraintSpec) -> Matcher:
        """A matcher at the start. Raises InvalidRequest naming the parameter of a grammar that does
        not compile, and Unsupported where there are no grammars."""

    def masks(self, matchers: Sequence[Any]) -> list[bytes]:
        """What each of them allows next; anything for those with a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The size of a mask, and what is hidden in any."""

    size: int
    never: frozenset[int]
    """Ids that nobody may choose."""

    def mask(self, ids: int) -> bytes:
        """The mask of a set of ids, given as an integer with their bits."""
        return ids.to_bytes(-(-self.size // 32) * 4, "little")

    @property
    def all_ids(self) -> int:
        """Every id that may be chosen."""
        return ((1 << self.size) - 1) & ~to_bits(self.never)


def to_bits(ids: Iterable[int]) -> int:
    """The integer whose bits are `ids`. O(ids): an integer as wide as a vocabulary, changed bit by
    bit, would be copied for each."""
    listed = list(ids)
    held = bytearray(max(listed, default=0) // 8 + 1)
    for one in listed:
        held[one >> 3] |= 1 << (one & 7)
    return int.from_bytes(held, "little")


class Constraint:
    """One request's. Read and written by the core, but for `compute`, which a thread calls until
    `is_ready`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        matcher: Matcher | None,
        allowed: int | None,
        sequences: Sequence[tuple[int, ...]],
        hidden: int,
        hidden_first: int,
        min_tokens: int,
    ) -> None:
        """Sets of ids are integers with their bits. `allowed` None: all of them. `sequences`, of
        two tokens or more, must not appear in the output. `hidden` ids, and for the first
        `min_tokens` tokens `hidden_first` ids, are not offered unless nothing else is: then a
        grammar is at its end."""
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._allowed = allowed
        self._sequences: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """By the token ahead of their last one: few of them can have come as far, and to compare
        all of 500 long ones takes 2 ms a token, for which the core waits."""
        for *head, last in sequences:
            self._sequences.setdefault(head[-1], []).append((tuple(head), last))
        self._hidden = hidden
        self._hidden_first = hidden_first
        self._min_tokens = min_tokens
        self._longest = max((len(one) for one in sequences), default=1) - 1
        self._tail: tuple[int, ...] = ()
        self._num_tokens = 0
        self._failure: Stop | None = None
        self._mask = b""
        self._job: Future[None] | None = None

    @property
    def matcher(self) -> Matcher | None:
        """The grammar's; None where there is none."""
        return self._matcher

    @property
    def is_ready(self) -> bool:
        """The mask of the next token is there."""
        return self._job is not None and self._job.done()

    @property
    def mask(self) -> bytes:
        """Of the next token. Waits for it."""
        assert self._job is not None, "no mask was asked for"
        self._job.result()
        return self._mask

    def begin(self, job: Future[None]) -> None:
        """The mask is made by `job`."""
        self._job = job

    def read(self, run: list[int], stop: Stop | None) -> Stop | None:
        """Takes in tokens that were committed; where the request ends, if not where `stop` says.

        A complete grammar ends it as a stop token does, also at its last token. What was decided
        where nothing was allowed is dropped: such a request is at a dead end.
        """
        if self._failure is not None:
            return self._failure
        kept = run if stop is None else run[: stop.keep]
        for index, token in enumerate(kept):
            self._num_tokens += 1
            if self._longest:
                self._tail = (*self._tail, token)[-self._longest :]
            matcher = self._matcher
            if matcher is None:
                continue
            matcher.accept(token)
            if matcher.failure:
                return Stop(index, FinishReason.DEAD_END, None, matcher.failure)
            if matcher.is_complete:
                ended = Stop(index + 1, FinishReason.STOP_TOKEN, None, "")
                if stop is None or stop.keep > ended.keep or stop.reason is FinishReason.LENGTH:
                    return ended
                return stop
        return stop

    def compute(self, of_grammar: bytes | None) -> None:
        """Makes the mask out of the grammar's (None: there is none)."""
        if self._matcher is not None and self._matcher.failure:
            self.fail(self._matcher.failure, FinishReason.DEAD_END)
            return
        hidden = self._hidden
        if self._num_tokens < self._min_tokens:
            hidden |= self._hidden_first
        if of_grammar is not None and not (hidden or self._sequences) and self._allowed is None:
            self._mask, is_empty = of_grammar, of_grammar.count(0) == len(of_grammar)
        else:
            bits = self._bits(of_grammar)
            self._mask, is_empty = self._vocabulary.mask(bits & ~hidden or bits), not bits
        if is_empty:
            why = "no token is left by everything that the answer must obey"
            self.fail(why, FinishReason.DEAD_END)

    def fail(self, why: str, reason: FinishReason = FinishReason.ERROR) -> None:
        """Nothing that is decided from here on counts; a row needs something to choose from."""
        self._failure = Stop(0, reason, None, why)
        self._mask = self._vocabulary.mask(self._vocabulary.all_ids)

    def _bits(self, of_grammar: bytes | None) -> int:
        bits = self._vocabulary.all_ids if self._allowed is None else self._allowed
        if of_grammar is not None:
            bits &= int.from_bytes(of_grammar, "little")
        for head, last in self._sequences.get(self._tail[-1], ()) if self._tail else ():
            if self._tail[len(self._tail) - len(head) :] == head:
                bits &= ~(1 << last)
        return bits


class MaskMaker:
    """Makes masks on a thread of its own, many at a time, and compiles grammars on others."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        """Without `grammars` nobody can be constrained."""
        self.grammars = grammars
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._compiling = ThreadPoolExecutor(2, thread_name_prefix="grammars")
        self._added: list[Constraint] = []
        self._newest: Future[None] | None = None

    def compile(self, spec: ConstraintSpec | None) -> Future[None] | None:
        """Compiles a grammar beside the steps; None: there is nothing to compile."""
        if spec is None or self.grammars is None or self.grammars.is_compiled(spec):
            return None
        return self._compiling.submit(self.grammars.compile, spec)

    def add(self, constraint: Constraint) -> None:
        """It needs the mask of its next token."""
        self._added.append(constraint)

    def begin(self, *more: Constraint) -> None:
        """Starts to make the masks of all that were added, and of these."""
        self._added += more
        if self._added:
            added, self._added = self._added, []
            self._newest = self._masking.submit(self._make, added)
            for one in added:
                one.begin(self._newest)

    def wait(self, *, beside_step: bool) -> None:
        """Until all masks that were begun are there; beside a step that runs, not for long."""
        if self._newest is not None and not self._newest.done():
            wait((self._newest,), PATIENCE_S if beside_step else None)

    def _make(self, constraints: Sequence[Constraint]) -> None:
        matchers = [one.matcher for one in constraints if one.matcher is not None]
        try:
            masks = iter(self.grammars.masks(matchers) if self.grammars else [])
            for one in constraints:
                one.compute(next(masks) if one.matcher is not None else None)
        except BaseException as failure:  # what a library panics with is no Exception
            if len(constraints) > 1:  # whose it is shows only when each is asked for by itself
                for one in constraints:
                    self._make([one])
                return
            # Theirs alone: the step, and everybody else in it, goes on.
            _LOG.exception("no mask for a request")
            constraints[0].fail(f"the grammar failed: {type(failure).__name__}: {failure}")
