"""Short spellings of what the core sends to a worker, for tests that stand in for the core."""

from __future__ import annotations

from typing import Any

from engine_service.core.params import MethodParams, ResolvedSampling
from engine_service.core.step import EMPTY_CANVAS, Canvas, NewRow, PageAppend, Span, StepPlan


def make_sampling(**changes: Any) -> ResolvedSampling:
    """Greedy, nothing else; `changes` override fields."""
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "seed": 0,
        "choice": 0,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop_token_ids": frozenset(),
        "stop_token_sequences": (),
        "suppress": (),
        "logprobs": None,
        "prompt_logprobs": None,
    }
    return ResolvedSampling(**(fields | changes))


def make_row(
    row: int,
    token_ids: list[int],
    *,
    canvas: Canvas = EMPTY_CANVAS,
    prompt_len: int | None = None,
    method: str = "autoregressive",
    **sampling: Any,
) -> NewRow:
    """A row that starts from `token_ids`; by default all of them are its prompt."""
    return NewRow(
        row=row,
        token_ids=token_ids,
        prompt_len=len(token_ids) if prompt_len is None else prompt_len,
        canvas=canvas,
        method=method,
        params=MethodParams(),
        sampling=make_sampling(**sampling),
    )


def causal_span(row: int, start: int, stop: int, *, decides: bool, scores: int | None = None):
    """Queries [start, stop) of a causal row; `scores` is the prompt length when it is scored."""
    decide_stop = stop + 1 if decides else stop
    if scores is None:
        return Span(row, start, stop, stop, 1, stop, decide_stop)
    return Span(row, start, stop, stop, 1, stop, decide_stop, start + 1, min(scores, stop + 1))


def make_plan(
    *spans: Span, rows: tuple[NewRow, ...] = (), pages: tuple[PageAppend, ...] = (), seq: int = 0
) -> StepPlan:
    """A plan from its parts."""
    return StepPlan(seq=seq, new_rows=rows, page_appends=pages, own_spans=spans)
