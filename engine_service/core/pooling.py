"""Prompts that are computed for their hidden states: no token is decided.

A pooling is a weight for every position (mean: 1 / n; last, cls: 1 for one of them), so a prompt
can be computed in any chunks, whose sums are added up on the device. It does not know how.
"""

from __future__ import annotations

from typing import Any

from engine_service.core.params import PoolingParams
from engine_service.core.step import EMPTY_CANVAS, FULL, Canvas, Decision, NewRow, Span, Update
from engine_service.core.strategy import Budget, DecodeStrategy, Needs, View


class Pooling(DecodeStrategy):
    """Its last span "decides" the position behind the prompt: the decision is the pooled vector.

    The worker finds such rows by their PoolingParams and never asks `decide`.
    """

    name = "pooling"
    Params = PoolingParams
    supports = frozenset()
    max_decide = 1
    min_tokens_per_step = 1

    def __init__(self, mask_block: int, *, reuses: bool = False) -> None:
        """`reuses`: cached prefixes are taken, which have keys and values but no hidden states;
        right where only the last position counts."""
        self.mask_block = mask_block
        self._reuses = reuses and mask_block < FULL

    @classmethod
    def for_model(
        cls,
        *,
        mask_block: int,
        mask_token_id: int | None,
        logits_shift: int,
        eos_token_ids: tuple[int, ...] = (),
        eot_token_ids: tuple[int, ...] = (),
    ) -> Pooling:
        """Every model has hidden states."""
        return cls(mask_block)

    def parse(self, knobs: dict[str, Any]) -> PoolingParams:
        """Pooling is asked for by PoolChoice, never by knobs of a decoding method."""
        raise AssertionError(f"pooling has no knobs: {knobs}")

    def needs(self, prompt_len: int, max_len: int, params: Any) -> Needs:
        """A whole prompt at once where every position sees every other, and then no pages."""
        if self.mask_block >= FULL:
            return Needs(prompt_len, 1, 0)
        return Needs(min(prompt_len, self.mask_block), 1, prompt_len)

    def begin(self, committed_len: int, params: Any, max_len: int) -> Canvas:
        """No tail."""
        return EMPTY_CANVAS

    def max_cached(self, committed_len: int) -> int:
        """All whole blocks ahead of the last token, or nothing."""
        return (committed_len - 1) // self.mask_block * self.mask_block if self._reuses else 0

    def room(self, view: View) -> int:
        """The prompt; nothing for what is computed aside of the pages."""
        return 0 if self.mask_block >= FULL else view.committed_len

    def plan(self, view: View, budget: Budget) -> Span | None:
        """As much of the prompt as the budget allows, cut on a border of `mask_block`."""
        row, start, end, block = view.row, view.num_cached, view.committed_len, self.mask_block
        if block >= FULL:
            span = Span(row, 0, end, 0, FULL, end, end + 1, aside=1)
            return span if budget.allows(span) else None
        if end - start <= budget.tokens and budget.logits > 0:
            return Span(row, start, end, end, block, end, end + 1)
        stop = start + min(budget.tokens, end - start - 1) // block * block
        return Span(row, start, stop, stop, block, stop, stop) if stop > start else None

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        """No token; the keys and values of the span are those of any other prompt."""
        return Update([], None, span.kv_len, EMPTY_CANVAS)

    def bind(self, max_rows: int, device: Any) -> None:
        """The method keeps nothing per row."""

    def admit(self, rows: list[NewRow]) -> None:
        """The method keeps nothing per row."""

    def decide(self, batch: Any) -> Any:
        """Never asked."""
        raise AssertionError("rows that are pooled have no logits")
