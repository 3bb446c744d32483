"""Block diffusion (SDAR, LLaDA2): the tokens of a block are revealed in any order, block by block.

Host half and device half of the method; it does not know requests, pages or models. A finished
block is committed and streamed at once; its final KV is stored by the first span of the next
block, which starts one block earlier. The block-causal mask makes that exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_service.core.step import Canvas, Decision, NewRow, Span, TokenLogprobs, Update
from engine_service.core.strategy import DecodeStrategy
from engine_service.decoding.knobs import read_choice, read_number, read_whole, reject_unknown
from engine_service.decoding.unmask import REMASKING, quota, reveal
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.sampling.sampler import choose, token_logprobs
from engine_service.staging import stage
from tidemill.runtime.errors import Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDiffusionParams:
    """Knobs of one request. `threshold` serves threshold and low_confidence_dynamic, `steps` the
    three rules with a schedule; a threshold above 1 reveals one token per step."""

    remasking: str = "threshold"
    threshold: float = 0.9
    steps: int


class BlockDiffusion(DecodeStrategy):
    """Blocks are aligned at position 0; `block` is the model's own block length.

    Every line of the device tables is a row: `_lines` [R, 4] int64 (rule, steps, decisions taken,
    start of the block these were taken in) and `_threshold` [R] float64.
    """

    name = "block_diffusion"
    Params = BlockDiffusionParams
    supports = frozenset({"logprobs", "min_tokens", "logit_bias", "canvas"})

    def __init__(self, *, block: int, mask_token_id: int) -> None:
        self.mask_block = self.max_decide = self.min_tokens_per_step = block
        self._mask_token_id = mask_token_id

    @classmethod
    def for_model(cls, *, mask_block: int, mask_token_id: int | None) -> BlockDiffusion:
        """Raises Unsupported for a model without a mask token."""
        if mask_token_id is None:
            raise Unsupported(f"{cls.name} needs a model with a mask token", param="method")
        return cls(block=mask_block, mask_token_id=mask_token_id)

    def parse(self, knobs: dict[str, Any]) -> BlockDiffusionParams:
        """Checked knobs; `steps` defaults to one position per step."""
        reject_unknown(knobs, BlockDiffusionParams, self.name)
        block = self.mask_block
        return BlockDiffusionParams(
            remasking=read_choice("remasking", knobs.get("remasking", "threshold"), REMASKING),
            threshold=read_number("threshold", knobs.get("threshold", 0.9), low=0.0),
            steps=read_whole("steps", knobs.get("steps", block), low=1, high=block),
        )

    def begin(self, committed_len: int, params: Any) -> Canvas:
        """Masks up to the next border; a whole block if the prompt ends on one."""
        return self._masks(self.mask_block - committed_len % self.mask_block)

    def max_cached(self, committed_len: int) -> int:
        """Whole blocks only: the open block sees itself, so its KV is not final."""
        return committed_len - committed_len % self.mask_block

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        """Commits the leading final positions of the canvas; opens a block when it is full."""
        if decision is None or span.decide_start == span.decide_stop:
            return Update([], None, span.stop, canvas)
        first = span.decide_start - committed_len
        last = span.decide_stop - committed_len
        # Open positions all lie in the decided range, and fixed ones in it come back as they were.
        ids = (*canvas.token_ids[:first], *decision.token_ids, *canvas.token_ids[last:])
        fixed = (*canvas.fixed[:first], *decision.final, *canvas.fixed[last:])
        num_final = fixed.index(False) if False in fixed else len(fixed)
        num_cached = committed_len + len(ids) - self.mask_block
        logprobs = _merge_logprobs(canvas, decision, first)
        committed_logprobs = None if logprobs is None else list(logprobs[:num_final])
        if num_final == len(ids):
            opened = self._masks(self.mask_block)
            return Update(list(ids), committed_logprobs, num_cached, opened)
        rest = None if logprobs is None else logprobs[num_final:]
        tail = Canvas(ids[num_final:], fixed[num_final:], canvas.step + 1, rest)
        return Update(list(ids[:num_final]), committed_logprobs, num_cached, tail)

    def bind(self, max_rows: int, device: Any) -> None:
        """One line more than there are rows, for padding."""
        self._lines = torch.zeros((max_rows + 1, 4), dtype=torch.int64, device=device)
        self._lines[:, 1] = 1
        self._threshold = torch.ones(max_rows + 1, dtype=torch.float64, device=device)

    def admit(self, rows: list[NewRow]) -> None:
        """Writes knobs, and the step counter that a preempted request left with."""
        lines: list[tuple[int, ...]] = []
        for new in rows:
            params: BlockDiffusionParams = new.params
            block_start = self.max_cached(len(new.token_ids))
            rule = REMASKING.index(params.remasking)
            lines.append((new.row, rule, params.steps, new.canvas.step, block_start))
        thresholds = [new.params.threshold for new in rows]
        arrays = [np.array(lines, dtype=np.int64), np.array(thresholds, dtype=np.float64)]
        table, values = stage(arrays, self._lines.device)
        self._lines[table[:, 0]] = table[:, 1:]
        self._threshold[table[:, 0]] = values

    def decide(self, batch: DecideBatch) -> DecideResult:
        """Chooses a token for every open position and reveals what each row's rule says."""
        rows, positions, tables = batch.rows, batch.positions, batch.tables
        count = torch.arange(len(rows), device=rows.device)
        span_of = torch.searchsorted(batch.cu_decide[1:].contiguous(), count, right=True)
        taken, block_start = self._steps_taken(batch)
        choice = choose(batch, taken[span_of], with_probs=True)
        chosen, probs = choice.token_ids, choice.probs
        is_open = ~tables.fixed[rows, positions]
        take = self._reveal(batch, span_of, probs, is_open, taken, block_start)
        token_ids = torch.where(take, chosen, tables.tokens[rows, positions])
        final = take | ~is_open
        tables.tokens[rows, positions] = token_ids
        tables.fixed[rows, positions] = final
        self._lines[batch.span_rows, 2] = taken + 1
        self._lines[batch.span_rows, 3] = block_start
        scores = token_logprobs(batch, chosen)
        return DecideResult(
            token_ids=token_ids,
            final=final,
            logprobs=scores.logprobs if scores else None,
            logprob_ids=scores.ids if scores else None,
            ranks=scores.ranks if scores else None,
        )

    def _steps_taken(self, batch: DecideBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] decisions taken in the span's block, and its start; a new block counts from 0."""
        # Spans of padding may be empty, also at the very end.
        last = len(batch.positions) - 1
        first = batch.positions[batch.cu_decide[:-1].clamp(max=last)]
        block_start = first - first % self.mask_block
        lines = self._lines[batch.span_rows]
        return torch.where(lines[:, 3] == block_start, lines[:, 2], 0), block_start

    def _reveal(
        self,
        batch: DecideBatch,
        span_of: torch.Tensor,
        probs: torch.Tensor,
        is_open: torch.Tensor,
        taken: torch.Tensor,
        block_start: torch.Tensor,
    ) -> torch.Tensor:
        """[N] bool: the open positions that become final."""
        block = self.mask_block
        column = batch.positions % block
        shape = (len(batch.span_rows), block)
        confidence = torch.zeros(shape, dtype=probs.dtype, device=probs.device)
        masked = torch.zeros(shape, dtype=torch.bool, device=probs.device)
        confidence[span_of, column] = probs
        masked[span_of, column] = is_open
        lines = self._lines[batch.span_rows]
        prompt_lens = batch.tables.prompt_lens[batch.span_rows]
        num_masks = (block_start + block - prompt_lens).clamp(max=block)
        counts = quota(num_masks, lines[:, 1], taken)
        thresholds = self._threshold[batch.span_rows]
        take = reveal(lines[:, 0], confidence, masked, thresholds, counts)
        return take[span_of, column]

    def _masks(self, count: int) -> Canvas:
        return Canvas((self._mask_token_id,) * count, (False,) * count)


def _merge_logprobs(
    canvas: Canvas, decision: Decision, first: int
) -> tuple[TokenLogprobs | None, ...] | None:
    """Reveal-time log-probabilities per canvas position; None when the request wants none.

    `first` is the canvas position of the decision's first entry; a position keeps what it got in
    the step that fixed it.
    """
    if decision.logprobs is None:
        return canvas.logprobs
    merged = list(canvas.logprobs or (None,) * len(canvas.token_ids))
    for place, entry in enumerate(decision.logprobs, first):
        if decision.final[place - first] and not canvas.fixed[place]:
            merged[place] = entry
    return tuple(merged)
