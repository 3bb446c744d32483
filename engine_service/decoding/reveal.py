"""Reveals masked positions step by step: the device half of it, and the state of every row.

Shared by the methods whose tokens are revealed in any order. It does not know how a method lays out
its blocks, plans spans or commits tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine_service.decoding.reveal_knobs import RevealKnobs, remembers
from engine_service.decoding.rules import RULES, Count
from engine_service.decoding.settle import RevealState, held_back, open_settling
from engine_service.kernels.reveal_rows import RowStates
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.sampling.held import HeldIds
from engine_service.sampling.sampler import choose_with_confidence, token_logprobs
from engine_service.staging import stage


class RevealTables:
    """Device half: every line is a row, with one more for padding. Single writer."""

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        *,
        mask_token_id: int,
        ends: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> None:
        """`ends` are the ids that end a text, and those that end a turn."""
        lines = max_rows + 1
        rows = RowStates(
            rules=torch.zeros((lines, 8), dtype=torch.int64, device=device),
            limits=torch.zeros((lines, 6), dtype=torch.float64, device=device),
            progress=torch.zeros((lines, 3), dtype=torch.int64, device=device),
            adapted=torch.zeros(lines, dtype=torch.float64, device=device),
        )
        rows.rules[:, [2, 5]] = 1
        rows.limits[:, 4] = torch.inf
        self._state = RevealState(rows, mask_token_id)
        self._ends = torch.tensor(sorted({*ends[0], *ends[1]}), dtype=torch.int64, device=device)
        late = torch.tensor(ends[1] or ends[0], dtype=torch.int64, device=device)
        self._ends_when_drawn = torch.isin(self._ends, late)

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
            first = own.start_threshold if rule.count is Count.AT_MOST else own.threshold
            bounds = (first, own.low_threshold, own.factor, own.entropy_bound)
            limits.append((*bounds, least, own.alg_temp))
        where, whole, real = stage(
            [
                np.array(rows, dtype=np.int64),
                np.array(lines, dtype=np.int64),
                np.array(limits, dtype=np.float64),
            ],
            self._ends.device,
        )
        states = self._state.rows
        states.rules[where] = whole[:, :8]
        states.progress[where] = whole[:, 8:]
        states.limits[where] = real

    def decide(self, batch: DecideBatch, *, width: int) -> DecideResult:
        """Chooses a token for every open position and reveals what each row's rule says.

        A span decides positions of one block. `width` is a constant of the method, at least the
        longest block of any row. Captured in CUDA graphs: nothing here waits for the device.
        """
        settling = open_settling(batch, self._state, width=width)
        held = None
        if batch.wants.holds_ends:
            late = self._state.rows.rules[:, 7].bool()
            held = HeldIds(self._ends, late, self._ends_when_drawn)
        choice = choose_with_confidence(batch, settling.draws, held)
        # Before it is written.
        was_open = None
        if batch.wants.max_logprobs is not None:
            was_open = ~batch.tables.fixed[batch.rows, batch.positions]
        seen = choice
        if held is not None:
            seen = held_back(choice, held.chosen(batch, choice.token_ids))
        token_ids, final = settling.settle(seen)
        told = choice.token_ids
        if was_open is not None:
            # A token that was not chosen anew is final too where editing ends.
            told = torch.where(final & was_open, token_ids, told)
        scores = token_logprobs(batch, told)
        return DecideResult(
            token_ids=token_ids,
            final=final,
            logprobs=scores.logprobs if scores else None,
            logprob_ids=scores.ids if scores else None,
            ranks=scores.ranks if scores else None,
            confidence=choice.probs,
        )
