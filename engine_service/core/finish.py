"""Where a run of newly committed tokens ends a request.

It does not know strategies: one token or a whole block arrives as a run. The length of the context
needs no check of its own, because admission keeps prompt + max_tokens within it.
"""

from __future__ import annotations

from typing import NamedTuple

from engine_service.core.messages import FinishReason
from engine_service.core.params import ResolvedSampling


class Stop(NamedTuple):
    """The request ends behind the first `keep` tokens of the run."""

    keep: int
    reason: FinishReason
    stop_token_id: int | None
    detail: str


def find_stop(
    committed: list[int], prompt_len: int, run: list[int], sampling: ResolvedSampling
) -> Stop | None:
    """The first end inside `run`, which follows `committed` (not yet appended); None: go on.

    At one position a stop token goes before a stop sequence, and that before the length. Tokens
    before `min_tokens` never stop. The stopping token belongs to the output.
    """
    num_before = len(committed) - prompt_len
    stop_ids = sampling.stop_token_ids
    sequences = sampling.stop_token_sequences
    may_end = num_before + len(run) >= sampling.max_tokens
    if not (may_end or sequences) and stop_ids.isdisjoint(run):
        return None
    for index, token in enumerate(run):
        num_output = num_before + index + 1
        if num_output >= sampling.min_tokens:
            if token in stop_ids:
                return Stop(index + 1, FinishReason.STOP_TOKEN, token, "")
            if sequences:
                detail = _matched(committed, prompt_len, run[: index + 1], sequences)
                if detail is not None:
                    return Stop(index + 1, FinishReason.STOP_SEQUENCE, None, detail)
        if num_output >= sampling.max_tokens:
            return Stop(index + 1, FinishReason.LENGTH, None, "")
    return None


def _matched(
    committed: list[int],
    prompt_len: int,
    run: list[int],
    sequences: tuple[tuple[int, ...], ...],
) -> str | None:
    """The stop sequence that the output ends with, as text; it may span earlier runs."""
    longest = max(map(len, sequences))
    tail = (*committed[max(prompt_len, len(committed) - longest) :], *run)
    for sequence in sequences:
        if tail[-len(sequence) :] == sequence:
            return ",".join(map(str, sequence))
    return None
