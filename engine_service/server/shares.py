"""Cuts a step's columns into what belongs to each stream. It does not know the streams."""

from __future__ import annotations

from engine_service.core.messages import StepOutput
from engine_service.server.outlet import TOKEN_BYTES, StepRows


def select(output: StepOutput, handles: list[int], rows: list[int], offsets: list[int]) -> StepRows:
    """The part of a step that belongs to one stream."""
    size, tokens, counts = TOKEN_BYTES, output.token_ids, output.counts
    picked = [tokens[offsets[row] * size : offsets[row + 1] * size] for row in rows]
    sparse: dict[int, int] = {}
    tables = output.logprobs, output.prompt_logprobs, output.finished, output.canvas, output.opened
    if any(tables):
        sparse = {row: i for i, row in enumerate(rows)}
    return StepRows(
        seq=output.seq,
        handles=handles,
        counts=[counts[row] for row in rows],
        token_ids=b"".join(picked),
        logprobs=[(sparse[r], entry) for r, entry in output.logprobs if r in sparse],
        prompt_logprobs=[
            (sparse[r], at, entry) for r, at, entry in output.prompt_logprobs if r in sparse
        ],
        finished=[(sparse[r], entry) for r, entry in output.finished if r in sparse],
        canvas=[(sparse[r], shown) for r, shown in output.canvas if r in sparse],
        opened=[(sparse[r], cached) for r, cached in output.opened if r in sparse],
    )
