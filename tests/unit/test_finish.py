"""Where a run of committed tokens ends a request, against a loop that looks at one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.finish import Stop, find_stop
from engine_service.core.messages import FinishReason
from engine_service.core.params import ResolvedSampling

PLAIN = ResolvedSampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={},
    seed=0,
    choice=0,
    max_tokens=100,
    min_tokens=0,
    stop_token_ids=frozenset(),
    stop_token_sequences=(),
    suppress=(),
    logprobs=None,
    prompt_logprobs=None,
)
STOP, SEQUENCE, LENGTH = FinishReason.STOP_TOKEN, FinishReason.STOP_SEQUENCE, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("run", "changes", "stop"),
    [
        ([5, 6], {}, None),
        ([5, 6, 7], {"stop_token_ids": frozenset({6})}, Stop(2, STOP, 6, "")),
        ([5, 6, 7], {"max_tokens": 4}, Stop(2, LENGTH, None, "")),
        ([5, 6], {"max_tokens": 4, "stop_token_ids": frozenset({6})}, Stop(2, STOP, 6, "")),
        ([6, 5, 6], {"min_tokens": 4, "stop_token_ids": frozenset({6})}, Stop(3, STOP, 6, "")),
        ([2, 3], {"stop_token_sequences": ((1, 2),)}, Stop(1, SEQUENCE, None, "1,2")),
        ([2, 3], {"stop_token_sequences": ((9, 1, 2),)}, None),
        ([4, 4, 4], {"stop_token_sequences": ((1, 4, 4),)}, Stop(2, SEQUENCE, None, "1,4,4")),
    ],
)
def test_the_first_end_inside_the_run_counts(
    run: list[int], changes: dict, stop: Stop | None
) -> None:
    """Prompt [9], output so far [0, 1]; a sequence never reaches into the prompt."""
    assert find_stop([9, 0, 1], 1, run, replace(PLAIN, **changes)) == stop


TOKENS = st.lists(st.integers(0, 3), max_size=8)


@given(
    output=TOKENS,
    run=TOKENS,
    stop_ids=st.frozensets(st.integers(0, 3), max_size=2),
    sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 6),
)
def test_a_run_ends_where_its_tokens_one_by_one_would(
    output: list[int],
    run: list[int],
    stop_ids: frozenset[int],
    sequences: list[list[int]],
    max_tokens: int,
    min_tokens: int,
) -> None:
    sampling = replace(
        PLAIN,
        stop_token_ids=stop_ids,
        stop_token_sequences=tuple(map(tuple, sequences)),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
    )
    prompt = [0, 1, 2]
    expected = None
    for keep in range(1, len(run) + 1):
        text = output + run[:keep]
        allowed = len(text) >= min_tokens
        if allowed and text[-1] in stop_ids:
            expected = (keep, STOP)
        elif allowed and any(text[-len(s) :] == s for s in sequences):
            expected = (keep, SEQUENCE)
        elif len(text) >= max_tokens:
            expected = (keep, LENGTH)
        if expected:
            break
    stop = find_stop(prompt + output, len(prompt), run, sampling)
    assert (stop and (stop.keep, stop.reason)) == expected
