"""Block diffusion (SDAR, LLaDA2): the tokens of a block are revealed in any order, block by block.

Host half and device half of the method; it does not know requests, pages or models. A finished
block is committed and streamed at once; its final KV is stored by the first span of the next
block, which starts one block earlier. The block-causal mask makes that exact. Where steps are
planned ahead of decisions and the rule does not say when a block is full, it is taken to be open
still: if it was not, the step that followed in vain found nothing to reveal and stored its KV.
"""

from __future__ import annotations

from typing import Any

from engine_service.core.step import Canvas, Decision, NewRow, Span, Update
from engine_service.core.strategy import Budget, DecodeStrategy, View
from engine_service.decoding.knobs import reject_unknown
from engine_service.decoding.pace import left_open
from engine_service.decoding.reveal import RevealTables
from engine_service.decoding.reveal_knobs import (
    RevealKnobs,
    one_by_one,
    read_knobs,
    remembers,
    with_defaults,
)
from engine_service.decoding.tail import count_fixed, masks, merge
from engine_service.sampling.batch import DecideBatch, DecideResult
from tidemill.runtime.errors import Unsupported


class BlockDiffusion(DecodeStrategy):
    """Blocks are aligned at position 0; `block` is the model's own block length."""

    name = "block_diffusion"
    Params = RevealKnobs
    supports = frozenset({"logprobs", "min_tokens", "logit_bias", "canvas", "pinned", "constraint"})

    def __init__(
        self,
        *,
        block: int,
        mask_token_id: int,
        logits_shift: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        eot_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.mask_block = self.max_decide = block
        self.min_tokens_per_step = block + logits_shift
        self.mask_token_id: int = mask_token_id
        self._shift = logits_shift
        self._ends = (eos_token_ids, eot_token_ids)

    @classmethod
    def for_model(
        cls,
        *,
        mask_block: int,
        mask_token_id: int | None,
        logits_shift: int,
        eos_token_ids: tuple[int, ...] = (),
        eot_token_ids: tuple[int, ...] = (),
    ) -> BlockDiffusion:
        """Raises Unsupported for a model without a mask token."""
        if mask_token_id is None:
            raise Unsupported(f"{cls.name} needs a model with a mask token", param="method")
        return cls(
            block=mask_block,
            mask_token_id=mask_token_id,
            logits_shift=logits_shift,
            eos_token_ids=eos_token_ids,
            eot_token_ids=eot_token_ids,
        )

    def with_defaults(self, defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
        """Leaves out defaults of other rules."""
        return with_defaults(defaults, asked)

    def parse(self, knobs: dict[str, Any]) -> RevealKnobs:
        """Checked knobs; `steps` are those of a block."""
        reject_unknown(knobs, RevealKnobs, self.name)
        return read_knobs(knobs, max_steps=self.mask_block)

    def constrained(self, params: RevealKnobs, asked: dict[str, Any]) -> RevealKnobs:
        """The leftmost mask falls, and no other: what may stand to its right is not known yet."""
        return one_by_one(params, asked)

    def begin(self, committed_len: int, params: Any, max_len: int) -> Canvas:
        """Masks up to the next border; a whole block if the prompt ends on one."""
        return masks(self.mask_token_id, self.mask_block - committed_len % self.mask_block)

    def plan(self, view: View, budget: Budget) -> Span | None:
        """As every method that caches what it commits. With shifted logits a span whose own first
        position is open begins at the query ahead of it, which is in the pages already."""
        span = super().plan(view, budget)
        if span is None or not span.num_decided:
            return span
        span = count_fixed(span, view.committed_len, view.canvas)
        if span.decide_start - self._shift >= span.start:
            return span
        span = span._replace(start=span.decide_start - self._shift, store_from=span.start)
        return span if budget.allows(span) else None

    def restart(self, view: View) -> tuple[int, Canvas]:
        """A block goes on where it was, unless its rule depends on how it went so far."""
        if not remembers(view.params):
            return view.committed_len, view.canvas
        start = max(view.prompt_len, self.max_cached(view.committed_len))
        return start, masks(self.mask_token_id, self.mask_block - start % self.mask_block)

    def max_cached(self, committed_len: int) -> int:
        """Whole blocks only: the open block sees itself, so its KV is not final."""
        return committed_len - committed_len % self.mask_block

    def foresee(self, view: View, span: Span, *, may_err: bool) -> View | None:
        """The block that `span` decides on is still open, or full behind it, where its rule says
        which. A step that may be in vain takes it to be open: it is one of many tokens, in which
        spans of two blocks cost as much as a step that stores a block, and are captured less. A
        block that is known to be full was stored by `span`. With shifted logits a span of a full
        block decides the next one's first token."""
        if self._shift:
            return None
        canvas, size = view.canvas, self.mask_block
        is_full = span.decide_stop <= view.committed_len
        if may_err:
            return view._replace(num_cached=span.stop if is_full else span.stop - size)
        num_open, steps = canvas.fixed.count(False), view.params.steps
        left = None if is_full else left_open(view.params, num_open, step=canvas.step, steps=steps)
        if left is None:
            return None
        if left:
            return view._replace(num_cached=span.stop - size)
        end, opened = view.committed_len + len(canvas.fixed), masks(self.mask_token_id, size)
        return view._replace(committed_len=end, num_cached=end - size, canvas=opened)

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        """Commits the leading final positions of the canvas; opens a block when it is full."""
        if decision is None or span.decide_stop <= max(committed_len, span.decide_start):
            return Update([], None, span.stop, canvas)
        tail = merge(committed_len, canvas, span, decision)
        num_cached = committed_len + len(tail.token_ids) - self.mask_block
        if tail.num_final == len(tail.token_ids):
            opened = masks(self.mask_token_id, self.mask_block)
            return Update(tail.committed, tail.committed_logprobs, num_cached, opened)
        rest = tail.rest(canvas.step + 1)
        return Update(tail.committed, tail.committed_logprobs, num_cached, rest)

    def bind(self, max_rows: int, device: Any) -> None:
        """What the rules need per row."""
        self._tables = RevealTables(
            max_rows, device, mask_token_id=self.mask_token_id, ends=self._ends
        )

    def admit(self, rows: list[NewRow]) -> None:
        """Writes knobs, and the step counter that a preempted request left with."""
        self._tables.admit(
            [new.row for new in rows],
            [new.params for new in rows],
            steps_taken=[new.canvas.step for new in rows],
            block_starts=[self.max_cached(len(new.token_ids)) for new in rows],
            origins=[0] * len(rows),
            blocks=[self.mask_block] * len(rows),
        )

    def decide(self, batch: DecideBatch) -> DecideResult:
        """Chooses a token for every open position and reveals what each row's rule says."""
        return self._tables.decide(batch, width=self.mask_block)
