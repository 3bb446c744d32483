"""One token per step, from left to right.

Host half and device half of the method; it does not know requests, pages or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine_service.core.params import MethodParams
from engine_service.core.step import EMPTY_CANVAS, Canvas, Decision, NewRow, Span, Update, new_span
from engine_service.core.strategy import DecodeStrategy
from engine_service.decoding.knobs import reject_unknown
from engine_service.kernels.store_tokens import store_tokens
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.sampling.sampler import choose, token_logprobs


@dataclass(frozen=True, slots=True)
class AutoregressiveParams(MethodParams):
    """The method has no knobs of its own; sampling parameters say everything."""


class Autoregressive(DecodeStrategy):
    """The token at n is decided from the logits of query n - 1."""

    name = "autoregressive"
    Params = AutoregressiveParams
    supports = frozenset(
        {"penalties", "logprobs", "prompt_logprobs", "min_tokens", "logit_bias", "constraint"}
    )
    mask_block = 1
    max_decide = 1
    min_tokens_per_step = 1
    append_only = True

    @classmethod
    def for_model(
        cls,
        *,
        mask_block: int,
        mask_token_id: int | None,
        logits_shift: int,
        eos_token_ids: tuple[int, ...] = (),
        eot_token_ids: tuple[int, ...] = (),
    ) -> Autoregressive:
        """Any model with a next-token head can do it."""
        return cls()

    def parse(self, knobs: dict[str, Any]) -> AutoregressiveParams:
        """Raises InvalidRequest for every knob: there are none."""
        reject_unknown(knobs, AutoregressiveParams, self.name)
        return AutoregressiveParams()

    def begin(self, committed_len: int, params: Any, max_len: int) -> Canvas:
        """No tail."""
        return EMPTY_CANVAS

    def max_cached(self, committed_len: int) -> int:
        """All but the last token, whose logits decide the next one."""
        return committed_len - 1

    def advance(self, span: Span) -> Span:
        """Computes the token that `span` decides and decides the next; which, the device knows."""
        row, _, start, _, _, _, stop, _, _, _, _, _, _ = span
        return new_span((row, start, stop, stop, 1, stop, stop + 1, 0, 0, 0, 0, 0, 0))

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        """Commits the decided token; its own KV is computed by the next span."""
        if decision is None or span.decide_start == span.decide_stop:
            return Update([], None, span.stop, EMPTY_CANVAS)
        return Update(decision.token_ids, decision.logprobs, span.stop, EMPTY_CANVAS)

    def bind(self, max_rows: int, device: Any) -> None:
        """The method keeps nothing per row."""

    def admit(self, rows: list[NewRow]) -> None:
        """The method keeps nothing per row."""

    def decide(self, batch: DecideBatch) -> DecideResult:
        """One token per span, written behind the committed ones."""
        rows, positions, tables = batch.rows, batch.positions, batch.tables
        token_ids = choose(batch, torch.zeros_like(positions))
        store_tokens(tables.tokens, tables.fixed, rows, positions, token_ids)
        scores = token_logprobs(batch, token_ids)
        return DecideResult(
            token_ids=token_ids,
            final=None,
            logprobs=scores.logprobs if scores else None,
            logprob_ids=scores.ids if scores else None,
            ranks=scores.ranks if scores else None,
        )
