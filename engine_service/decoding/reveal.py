"""Reveals masked positions step by step: the knobs of a request and the device half of it.

Shared by the methods whose tokens are revealed in any order. It does not know how a method lays out
its blocks, plans spans or commits tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from engine_service.decoding.knobs import read_choice, read_number, read_whole
from engine_service.decoding.rules import RULES, Count, Evidence, Order, Terms, present, reveal
from engine_service.kernels.confidence import confidence
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.sampling.rng import Purpose, draw_keys, uniform
from engine_service.sampling.sampler import Choice, choose, token_logprobs
from engine_service.staging import stage
from tidemill.runtime.errors import InvalidRequest

MAX_PARALLEL = 1 << 16
"""Largest `max_parallel`: more positions than any block has."""
_ADAPTIVE_START, _ADAPTIVE_STEP, _ADAPTIVE_LOW, _ADAPTIVE_HIGH = 0.3, 0.05, 0.1, 0.9
_MANY, _FEW = 0.7, 0.3
"""Shares of the masks that the adaptive rule took, beyond which its threshold moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevealKnobs:
    """What a rule needs to know of a request. Knobs that it does not read keep their defaults."""

    remasking: str
    """Name of the rule (rules.RULES)."""
    threshold: float = 0.9
    """Least confidence; above 1 one position is revealed per step."""
    steps: int
    """Steps per block of the rules with a schedule; they need not divide the masks."""
    factor: float = 1.0
    entropy_bound: float = 0.1
    """Nats."""
    max_parallel: int = 8
    """Most positions per step."""
    low_threshold: float = 0.4
    """Confidence above which the best position of every run of masks is revealed."""


_OF_RULES = frozenset(field.name for field in fields(RevealKnobs)) - {"remasking"}


def rule_of(knobs: dict[str, Any]) -> Any:
    """The rule that knobs ask for, by name or, as LLaDA's users do, by the number of steps."""
    return knobs.get("remasking", "low_confidence" if "steps" in knobs else "threshold")


def with_defaults(defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A request's knobs over default ones; defaults of a rule that is not its own are left out."""
    own = rule_of(asked if "remasking" in asked else {**defaults, **asked})
    if (
        not isinstance(own, str)
        or own not in RULES
        or asked.keys().isdisjoint({"remasking", "steps"})
    ):
        return {**defaults, **asked}
    if "steps" in asked and "remasking" not in asked and "steps" not in RULES[own].reads:
        own = "low_confidence"
    kept = {k: v for k, v in defaults.items() if k not in _OF_RULES or k in RULES[own].reads}
    return {**kept, "remasking": own, **asked}


def read_knobs(knobs: dict[str, Any], *, max_steps: int) -> RevealKnobs:
    """Checked knobs; names that RevealKnobs does not have are the method's own and not looked at.

    `steps` is at most and by default `max_steps`. Raises InvalidRequest for a wrong value, and for
    a knob that the rule would ignore.
    """
    name = read_choice("remasking", rule_of(knobs), tuple(RULES))
    _reject_unread(name, knobs)
    threshold = read_number("threshold", knobs.get("threshold", 0.9), low=0.0)
    low_threshold = knobs.get("low_threshold", min(0.4, threshold))
    return RevealKnobs(
        remasking=name,
        threshold=threshold,
        steps=read_whole("steps", knobs.get("steps", max_steps), low=1, high=max_steps),
        factor=read_number("factor", knobs.get("factor", 1.0), low=0.0),
        entropy_bound=read_number("entropy_bound", knobs.get("entropy_bound", 0.1), low=0.0),
        max_parallel=read_whole(
            "max_parallel", knobs.get("max_parallel", 8), low=1, high=MAX_PARALLEL
        ),
        low_threshold=read_number("low_threshold", low_threshold, low=0.0, high=threshold),
    )


def _reject_unread(name: str, knobs: dict[str, Any]) -> None:
    """Raises InvalidRequest naming the first knob that the rule does not read, and who does."""
    for knob in knobs:
        if knob in _OF_RULES and knob not in RULES[name].reads:
            readers = ", ".join(rule for rule in RULES if knob in RULES[rule].reads)
            raise InvalidRequest(
                f"The decoding parameter {knob} is not read by remasking {name!r}; leave it out, or"
                f" choose a rule that reads it: {readers}.",
                param=f"decoding.params.{knob}",
            )


def remembers(knobs: RevealKnobs) -> bool:
    """Whether the rule depends on how the block went so far, not on what is open and the step.

    Such a block cannot be taken up half way: a preempted request starts it anew.
    """
    return RULES[knobs.remasking].count is Count.AT_MOST


class RevealTables:
    """Device half: every line is a row, with one more for padding. Single writer.

    `_rules` [R, 6] int64: order, count, steps, max_parallel, origin, block length. `_limits` [R, 4]
    float64: threshold, low_threshold, factor, entropy_bound. `_progress` [R, 2] int64: decisions
    taken, and the start of the block that they were taken in. `_adapted` [R] float64: the adaptive
    rule's threshold, which starts anew with every block: +0.05 after a step that took more than 0.7
    of the masks, -0.05 after one that took less than 0.3, always in [0.1, 0.9].
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        lines = max_rows + 1
        self._rules = torch.zeros((lines, 6), dtype=torch.int64, device=device)
        self._rules[:, [2, 5]] = 1
        self._limits = torch.zeros((lines, 4), dtype=torch.float64, device=device)
        self._progress = torch.zeros((lines, 2), dtype=torch.int64, device=device)
        self._adapted = torch.zeros(lines, dtype=torch.float64, device=device)

    def admit(
        self,
        rows: Sequence[int],
        knobs: Sequence[RevealKnobs],
        *,
        steps_taken: Sequence[int],
        block_starts: Sequence[int],
        origins: Sequence[int],
        blocks: Sequence[int],
    ) -> None:
        """Writes the lines of `rows`; one entry per row in everything.

        `steps_taken` decisions were taken in the block that starts at `block_starts`, before the
        request was preempted. Blocks of `blocks` positions are counted from `origins`: 0, or the
        length of the prompt.
        """
        lines, limits = [], []
        at = zip(knobs, origins, blocks, steps_taken, block_starts, strict=True)
        for own, origin, block, taken, start in at:
            rule = RULES[own.remasking]
            assert not (taken and remembers(own)), f"{own.remasking} cannot be taken up half way"
            lines.append(
                (rule.order, rule.count, own.steps, own.max_parallel, origin, block, taken, start)
            )
            limits.append((own.threshold, own.low_threshold, own.factor, own.entropy_bound))
        where, whole, real = stage(
            [
                np.array(rows, dtype=np.int64),
                np.array(lines, dtype=np.int64),
                np.array(limits, dtype=np.float64),
            ],
            self._rules.device,
        )
        self._rules[where] = whole[:, :6]
        self._progress[where] = whole[:, 6:]
        self._limits[where] = real

    def decide(self, batch: DecideBatch, *, width: int) -> DecideResult:
        """Chooses a token for every open position and reveals what each row's rule says.

        A span decides positions of one block. `width` is a constant of the method, at least the
        longest block of any row. Captured in CUDA graphs: nothing here waits for the device.
        """
        rows, positions, tables = batch.rows, batch.positions, batch.tables
        count = torch.arange(len(rows), device=rows.device)
        span_of = torch.searchsorted(batch.cu_decide[1:].contiguous(), count, right=True)
        taken, block_start = self._find_blocks(batch)
        draws = taken[span_of]
        choice = choose(batch, draws, with_probs=True)
        is_open = ~tables.fixed[rows, positions]
        # Positions of padding lie anywhere.
        column = (positions - block_start[span_of]).clamp(min=0, max=width - 1)
        shape = (len(batch.span_rows), width)
        terms = self._terms(batch, taken, block_start)
        measures = _measure(batch, choice, draws, terms.order_R)
        seen = _lay_out(measures, is_open, (span_of, column), shape)
        take_RB = reveal(seen, terms)
        self._progress[batch.span_rows] = torch.stack((taken + 1, block_start), dim=1)
        self._adapted[batch.span_rows] = _adapt(terms.threshold_R, take_RB, seen.masked_RB)
        take = take_RB[span_of, column] & is_open
        token_ids = torch.where(take, choice.token_ids, tables.tokens[rows, positions])
        final = take | ~is_open
        tables.tokens[rows, positions] = token_ids
        tables.fixed[rows, positions] = final
        scores = token_logprobs(batch, choice.token_ids)
        return DecideResult(
            token_ids=token_ids,
            final=final,
            logprobs=scores.logprobs if scores else None,
            logprob_ids=scores.ids if scores else None,
            ranks=scores.ranks if scores else None,
        )

    def _find_blocks(self, batch: DecideBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] decisions taken in the span's block, and its start; a new block counts from 0."""
        # Spans of padding may be empty, also at the very end.
        last = len(batch.positions) - 1
        first = batch.positions[batch.cu_decide[:-1].clamp(max=last)]
        origin, block = self._rules[batch.span_rows, 4], self._rules[batch.span_rows, 5]
        start = first - (first - origin) % block
        progress = self._progress[batch.span_rows]
        return torch.where(progress[:, 1] == start, progress[:, 0], 0), start

    def _terms(self, batch: DecideBatch, taken: torch.Tensor, start: torch.Tensor) -> Terms:
        order, count, steps, max_parallel, _, block = self._rules[batch.span_rows].unbind(1)
        threshold, low_threshold, factor, bound = self._limits[batch.span_rows].unbind(1)
        adapted = torch.where(taken == 0, _ADAPTIVE_START, self._adapted[batch.span_rows])
        prompt_lens = batch.tables.prompt_lens[batch.span_rows]
        return Terms(
            order_R=order,
            count_R=count,
            num_masks_R=torch.minimum(start + block - prompt_lens, block),
            steps_R=steps,
            step_R=taken,
            max_parallel_R=max_parallel,
            threshold_R=torch.where(count == Count.AT_MOST, adapted, threshold),
            low_threshold_R=low_threshold,
            factor_R=factor,
            entropy_bound_R=bound,
        )


def _adapt(
    threshold_R: torch.Tensor, take_RB: torch.Tensor, masked_RB: torch.Tensor
) -> torch.Tensor:
    """[R] float64: the adaptive rule's threshold in the next step."""
    share = take_RB.sum(dim=1) / masked_RB.sum(dim=1).clamp(min=1).double()
    move = _ADAPTIVE_STEP * ((share > _MANY).double() - (share < _FEW).double())
    return (threshold_R + move).clamp(_ADAPTIVE_LOW, _ADAPTIVE_HIGH)


def _measure(
    batch: DecideBatch, choice: Choice, draws: torch.Tensor, order_R: torch.Tensor
) -> torch.Tensor:
    """[4, N] confidence, margin, negative entropy and a random number of every position; anything
    where no row is ordered by it.

    The first three are those of the raw logits, without temperature or filters: one more pass over
    them gives what the choice did not.
    """
    probs = choice.probs
    margin = negative_entropy = random = probs
    found = present(order_R, Order)
    if found & {Order.MARGIN, Order.NEGATIVE_ENTROPY}:
        of_logits = confidence(choice.raw_NV, choice.banned_ids)
        margin, negative_entropy = of_logits.margin, -of_logits.entropy
    if Order.UNIFORM in found:
        keys = draw_keys(batch.tables.seeds[batch.rows], Purpose.REMASK, batch.positions, draws)
        first = torch.zeros(1, dtype=torch.int64, device=keys.device)
        random = uniform(keys, first, probs.dtype)[:, 0]
    return torch.stack((probs, margin, negative_entropy, random))


def _lay_out(
    measures: torch.Tensor,
    is_open: torch.Tensor,
    place: tuple[torch.Tensor, torch.Tensor],
    shape: tuple[int, int],
) -> Evidence:
    """Measures [4, N] and open bits [N] as tables of `shape`; `place` are rows and columns [N]."""
    table = measures.new_zeros(len(measures), *shape)
    masked = is_open.new_zeros(shape)
    table[:, place[0], place[1]] = measures
    masked[place] = is_open
    return Evidence(
        masked_RB=masked,
        confidence_RB=table[0],
        margin_RB=table[1],
        negative_entropy_RB=table[2],
        uniform_RB=table[3],
    )
