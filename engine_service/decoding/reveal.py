"""Reveals masked positions step by step: the device half of it, and the state of every row.

Shared by the methods whose tokens are revealed in any order. It does not know how a method lays out
its blocks, plans spans or commits tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine_service.decoding.editing import Edit, edit
from engine_service.decoding.reveal_knobs import RevealKnobs, remembers
from engine_service.decoding.rules import RULES, Count, Evidence, Order, Terms, present, reveal
from engine_service.kernels.confidence import Confidence
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.sampling.rng import Purpose, draw_keys, uniform
from engine_service.sampling.sampler import choose_with_confidence, token_logprobs
from engine_service.staging import stage

_ADAPTIVE_START, _ADAPTIVE_STEP, _ADAPTIVE_LOW, _ADAPTIVE_HIGH = 0.3, 0.05, 0.1, 0.9
_NUM_SURE, _LAST = 3, -1e9
"""Measures of how sure a choice is, and what is below all of them."""
_MANY, _FEW = 0.7, 0.3
"""Shares of the masks that the adaptive rule took, beyond which its threshold moves."""


class RevealTables:
    """Device half: every line is a row, with one more for padding. Single writer.

    `_rules` [R, 8] int64: order, count, steps, max_parallel, origin, block length, most steps of
    editing alone, whether ends come last. `_limits` [R, 6] float64: threshold, low_threshold,
    factor, entropy_bound, edit_threshold (infinite: none), alg_temp. `_progress` [R, 3] int64:
    decisions taken, the start of the block that they were taken in, and how many of them found no
    mask. `_adapted` [R] float64: the adaptive rule's threshold, which starts anew with every block:
    +0.05 after a step that took more than 0.7 of the masks, -0.05 after one that took less than
    0.3, in [0.1, 0.9].
    """

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        *,
        mask_token_id: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        lines = max_rows + 1
        self._mask_token_id = mask_token_id
        self._eos_token_ids = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
        self._rules = torch.zeros((lines, 8), dtype=torch.int64, device=device)
        self._rules[:, [2, 5]] = 1
        self._limits = torch.zeros((lines, 6), dtype=torch.float64, device=device)
        self._limits[:, 4] = torch.inf
        self._progress = torch.zeros((lines, 3), dtype=torch.int64, device=device)
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
            schedule = (own.steps, own.max_parallel, origin, block, own.max_post_edit_steps)
            progress = (taken, start, 0)
            lines.append((rule.order, rule.count, *schedule, own.eos_last, *progress))
            least = math.inf if own.edit_threshold is None else own.edit_threshold
            bounds = (own.threshold, own.low_threshold, own.factor, own.entropy_bound)
            limits.append((*bounds, least, own.alg_temp))
        where, whole, real = stage(
            [
                np.array(rows, dtype=np.int64),
                np.array(lines, dtype=np.int64),
                np.array(limits, dtype=np.float64),
            ],
            self._rules.device,
        )
        self._rules[where] = whole[:, :8]
        self._progress[where] = whole[:, 8:]
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
        choice = choose_with_confidence(batch, taken[span_of])
        is_open = ~tables.fixed[rows, positions]
        current = tables.tokens[rows, positions]
        least = self._limits[batch.span_rows, 4]
        # No choice is ever the mask token: an open position without it holds a tentative token.
        is_masked = is_open & ((current == self._mask_token_id) | (least == torch.inf)[span_of])
        # Positions of padding lie anywhere.
        column = (positions - block_start[span_of]).clamp(min=0, max=width - 1)
        take = self._take(batch, choice, is_masked, (span_of, column), (taken, block_start), width)
        seen = Edit(
            span_of=span_of,
            is_open=is_open,
            is_masked=is_masked,
            take=take,
            differs=choice.token_ids != current,
            probs=choice.probs,
        )
        num_post = torch.where(taken == 0, 0, self._progress[batch.span_rows, 2])
        max_post = self._rules[batch.span_rows, 6]
        edited = edit(seen, least, num_post_R=num_post, max_post_R=max_post)
        token_ids = torch.where(edited.changed, choice.token_ids, current)
        final = ~is_open | edited.final
        progress = (taken + 1, block_start, edited.num_post_R)
        self._progress[batch.span_rows] = torch.stack(progress, dim=1)
        tables.tokens[rows, positions] = token_ids
        tables.fixed[rows, positions] = final
        # A token that was not chosen anew is final too where editing ends.
        scores = token_logprobs(batch, torch.where(final & is_open, token_ids, choice.token_ids))
        return DecideResult(
            token_ids=token_ids,
            final=final,
            logprobs=scores.logprobs if scores else None,
            logprob_ids=scores.ids if scores else None,
            ranks=scores.ranks if scores else None,
            confidence=choice.probs,
        )

    def _take(
        self,
        batch: DecideBatch,
        choice: Confidence,
        is_masked: torch.Tensor,
        place: tuple[torch.Tensor, torch.Tensor],
        progress: tuple[torch.Tensor, torch.Tensor],
        width: int,
    ) -> torch.Tensor:
        """[N] bool: masked positions that fall. `place` are their rows and columns in a table of
        `width`, `progress` the decisions taken and the block's start."""
        terms = self._terms(batch, *progress)
        measures = _measure(batch, choice, progress[0][place[0]], terms)
        ends = (choice.token_ids[:, None] == self._eos_token_ids).any(dim=1)
        comes_last = ends & self._rules[batch.rows, 7].bool()
        measures[:_NUM_SURE].masked_fill_(comes_last, _LAST)
        seen = _lay_out(measures, is_masked, place, (len(batch.span_rows), width))
        take_RB = reveal(seen, terms)
        self._adapted[batch.span_rows] = _adapt(terms.threshold_R, take_RB, seen.masked_RB)
        return take_RB[place] & is_masked

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
        order, count, steps, max_parallel, _, block, _, _ = self._rules[batch.span_rows].unbind(1)
        limits = self._limits[batch.span_rows].unbind(1)
        threshold, low_threshold, factor, bound, _, alg_temp = limits
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
            alg_temp_R=alg_temp,
        )


def _adapt(
    threshold_R: torch.Tensor, take_RB: torch.Tensor, masked_RB: torch.Tensor
) -> torch.Tensor:
    """[R] float64: the adaptive rule's threshold in the next step."""
    share = take_RB.sum(dim=1) / masked_RB.sum(dim=1).clamp(min=1).double()
    move = _ADAPTIVE_STEP * ((share > _MANY).double() - (share < _FEW).double())
    return (threshold_R + move).clamp(_ADAPTIVE_LOW, _ADAPTIVE_HIGH)


def _measure(
    batch: DecideBatch, choice: Confidence, draws: torch.Tensor, terms: Terms
) -> torch.Tensor:
    """[4, N] confidence, margin, negative entropy and a random number of every position, which is
    anything where no row needs one."""
    probs = choice.probs
    random = torch.full_like(probs, 0.5)
    # On CUDA every order is found, and nothing is looked at.
    if Order.UNIFORM in present(terms.order_R, Order) or bool((terms.alg_temp_R > 0).any()):
        keys = draw_keys(batch.tables.seeds[batch.rows], Purpose.REMASK, batch.positions, draws)
        first = torch.zeros(1, dtype=torch.int64, device=keys.device)
        random = uniform(keys, first, probs.dtype)[:, 0]
    return torch.stack((probs, choice.margin, -choice.entropy, random))


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
