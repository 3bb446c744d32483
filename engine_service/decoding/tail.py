"""Canvases on the host: how one begins, and what a decision makes of it. It knows no method."""

from __future__ import annotations

from typing import NamedTuple

from engine_service.core.step import Canvas, Decision, Span, TokenLogprobs


def masks(mask_token_id: int, count: int) -> Canvas:
    """A canvas of which nothing is decided."""
    return Canvas((mask_token_id,) * count, (False,) * count)


def count_fixed(span: Span, committed_len: int, canvas: Canvas) -> Span:
    """`span` with the number of its decided positions that are final in the canvas behind
    `committed_len` tokens."""
    first = max(0, span.decide_start - committed_len)
    decided = canvas.fixed[first : max(0, span.decide_stop - committed_len)]
    return span._replace(num_fixed=decided.count(True))


class Tail(NamedTuple):
    """A canvas after a decision, its final positions included; `num_final` lead it."""

    token_ids: tuple[int, ...]
    fixed: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs | None, ...] | None
    confidence: tuple[float, ...] | None
    num_final: int

    @property
    def committed(self) -> list[int]:
        """Tokens that are final up to the first open position."""
        return list(self.token_ids[: self.num_final])

    @property
    def committed_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Those of `committed`; None when the request wants none."""
        return None if self.logprobs is None else list(self.logprobs[: self.num_final])

    def rest(self, step: int) -> Canvas:
        """The canvas from the first open position on."""
        cut = self.num_final
        logprobs = None if self.logprobs is None else self.logprobs[cut:]
        confidence = None if self.confidence is None else self.confidence[cut:]
        return Canvas(self.token_ids[cut:], self.fixed[cut:], step, logprobs, confidence)


def merge(committed_len: int, canvas: Canvas, span: Span, decision: Decision) -> Tail:
    """The canvas behind `committed_len` tokens with what `span` decided in it.

    Open positions of what a span decides on all lie in its decided range, and fixed ones in that
    range come back as they were. Where the span was planned ahead of a decision, the range may
    begin with positions that are committed since, or all of it and what was pinned behind it may
    be: an executor that only simulates opens more than the rule said.
    """
    first = span.decide_start - committed_len
    last = max(0, span.decide_stop - committed_len)
    if first < 0:
        decision, first = decision.behind(-first), 0
    ids = (*canvas.token_ids[:first], *decision.token_ids, *canvas.token_ids[last:])
    fixed = (*canvas.fixed[:first], *decision.final, *canvas.fixed[last:])
    num_final = fixed.index(False) if False in fixed else len(fixed)
    logprobs = _merge_logprobs(canvas, decision, first)
    return Tail(ids, fixed, logprobs, _merge_confidence(canvas, decision, first), num_final)


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


def _merge_confidence(canvas: Canvas, decision: Decision, first: int) -> tuple[float, ...] | None:
    """Of the step that fixed a position, of this one elsewhere; None when nobody watches."""
    if canvas.confidence is None or decision.confidence is None:
        return canvas.confidence
    merged = list(canvas.confidence)
    for place, sure in enumerate(decision.confidence, first):
        if not canvas.fixed[place]:
            merged[place] = sure
    return tuple(merged)
