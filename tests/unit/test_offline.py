"""Spreading steps over the sequences of offline requests, against feeding their texts step by step.

The slow reference feeds a Choice with every step's delta at once, as a server does.
"""

from __future__ import annotations

import gc
import random
import struct
from typing import Any

import numpy as np
import pytest

from engine_service.core.messages import Finish, FinishReason, Load, StepOutput, Timings, Usage
from engine_service.core.step import TokenLogprobs
from frontend.choice import Choice, PromptView
from frontend.messages import Delta
from frontend.messages import TokenLogprobs as TextScores
from frontend.validation import MAX_SEQUENCES
from tidemill import offline
from tidemill.offline import Line, Pending, TextPrompt, calm_collector, spread
from tidemill.prompts import as_list
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import SamplingParams
from tidemill.vectors import as_inputs

IDLE = Load(0, 0, 0, 0, 0)
ENDED = Finish(FinishReason.LENGTH, None, "", Usage(3, 0, 9, 9, 0, 0), Timings(0, 0, 0, 0))


class Letters:
    """Token n is the n-th letter."""

    def detokenizer(self, **_: object) -> Letters:
        return self

    def piece(self, token_id: int) -> tuple[str, bytes]:
        return chr(97 + token_id), bytes([97 + token_id])

    def feed(self, token_ids: object) -> str:
        return "".join(chr(97 + i) for i in token_ids)  # type: ignore[attr-defined]

    def flush(self) -> str:
        return "."


def step(
    rows: dict[int, list[int]], ended: set[int] = frozenset(), scored: bool = False
) -> StepOutput:  # type: ignore[assignment]
    keys = list(rows)
    tokens = [token for run in rows.values() for token in run]
    logprobs = [
        (row, [TokenLogprobs((token, 0), (-0.5, -1.0), 1) for token in rows[key]])
        for row, key in enumerate(keys)
        if scored and rows[key]
    ]
    return StepOutput(
        seq=1, keys=keys, counts=[len(run) for run in rows.values()],
        token_ids=struct.pack(f"<{len(tokens)}I", *tokens), logprobs=logprobs,
        prompt_logprobs=[], canvas=[], load=IDLE,
        finished=[(keys.index(key), ENDED) for key in keys if key in ended],
    )  # fmt: skip


def pending(params: SamplingParams, name: str = "r") -> Pending:
    return Pending(name, TextPrompt("abc", [0, 1, 2]), params, Letters())  # type: ignore[arg-type]


def random_steps(keys: list[int], rng: random.Random, *, scored: bool) -> list[StepOutput]:
    """Runs of 0 to 3 tokens for some of the keys, which end one after the other."""
    steps, live = [], list(keys)
    while live:
        some = {key: [rng.randrange(26) for _ in range(rng.randint(0, 3))] for key in live}
        rows = {key: some[key] for key in live if rng.random() < 0.8}
        ended = {key for key in rows if rng.random() < 0.1}
        live = [key for key in live if key not in ended]
        steps.append(step(rows, ended, scored=scored))
    return steps


def fed_at_once(
    steps: list[StepOutput], key: int, params: SamplingParams
) -> tuple[str, list[int], int]:
    """(text, tokens, scores) of one key by feeding every step's delta."""
    choice = Choice(0, PromptView([0, 1, 2], "abc"), Letters(), offline._options(params))  # type: ignore[arg-type]
    text, tokens, scores = "", [], 0
    for output in steps:
        offsets = [0]
        for count in output.counts:
            offsets.append(offsets[-1] + count)
        ids = struct.unpack(f"<{offsets[-1]}I", output.token_ids)
        for row, owner in enumerate(output.keys):
            if owner != key or choice.finish is not None:
                continue
            delta = Delta(0, token_ids=list(ids[offsets[row] : offsets[row + 1]]))
            delta.logprobs += [TextScores(*e) for e in dict(output.logprobs).get(row, []) if e]
            if row in dict(output.finished):
                delta.finish = offline._finish(ENDED)
            new = choice.feed(delta)
            if new is not None:
                text, tokens, scores = (
                    text + new.text,
                    tokens + new.token_ids,
                    scores + len(new.logprobs),
                )
    return text, tokens, scores


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(logprobs=1), SamplingParams(stop="qq")],
    ids=["tokens", "logprobs", "stop"],
)
def test_outputs_do_not_depend_on_when_lines_are_read(params: SamplingParams, seed: int) -> None:
    rng = random.Random(seed)
    keys = [11, 12, 13, 14]
    steps = random_steps(keys, rng, scored=params.logprobs is not None)
    requests = {key: pending(params, str(key)) for key in keys}
    live = {key: request.lines[0] for key, request in requests.items()}
    for output in steps:
        list(spread(output, live))
    for key, request in requests.items():
        assert request.is_finished
        completion = request.output.outputs[0]
        text, tokens, num_scores = fed_at_once(steps, key, params)
        assert (completion.text, completion.token_ids) == (text, tokens)
        assert len(completion.logprobs or []) == num_scores


def test_stop_string_is_told_in_the_step_that_completes_it() -> None:
    request = pending(SamplingParams(stop="cd"))
    live = {5: request.lines[0]}
    assert list(spread(step({5: [0, 1, 2]}), live)) == []
    assert list(spread(step({5: [3, 4, 4]}), live)) == [(5, 4, "cd")]
    assert list(spread(step({5: [4]}), live)) == []
    assert list(spread(step({5: []}, {5}), live)) == []
    completion = request.output.outputs[0]
    assert (completion.text, completion.token_ids) == ("ab", [0, 1, 2, 3])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "cd")


def test_keys_that_nobody_waits_for_are_skipped() -> None:
    request = pending(SamplingParams())
    live = {2: request.lines[0]}
    rows = {1: [7, 7], 2: [1, 2], 3: [8]}
    assert list(spread(step(rows, {1, 2, 3}, scored=True), live)) == []
    assert request.output.outputs[0].token_ids == [1, 2]


def test_unwatched_lines_are_read_once() -> None:
    """What makes a token cheap: without stop strings no text is made before the end."""
    lines: list[Line] = []
    for stop in (None, "zz"):
        request = pending(SamplingParams(stop=stop))
        lines += request.lines
        assert list(spread(step({1: [0, 1]}), {1: request.lines[0]})) == []
    assert [line.shown.token_ids for line in lines] == [[], [0, 1]]
    assert [line.unread.token_ids for line in lines] == [[0, 1], []]


def test_collector_settings_come_back() -> None:
    before = gc.get_threshold()

    def fail() -> None:
        with calm_collector():
            assert gc.get_threshold() != before
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("stop", ["", ["a", ""], "a" * 1025])
def test_a_stop_string_that_a_server_refuses_is_refused(stop: str | list[str]) -> None:
    """An empty one ended every text before its first letter."""
    prompt, params = TextPrompt("a", [0]), SamplingParams(stop=stop)
    with pytest.raises(InvalidRequest, match=r"a stop string has .* must have 1 to 1024"):
        Pending("r", prompt, params, Letters())  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, MAX_SEQUENCES + 1, 100_000])
def test_n_has_the_limit_that_requests_have(n: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"n is {n}; it must lie in 1\.\.1024") as refused:
        pending(SamplingParams(n=n))
    assert refused.value.param == "n"
    assert len(pending(SamplingParams(n=MAX_SEQUENCES)).lines) == MAX_SEQUENCES, "the control"


def test_token_ids_of_numpy_are_one_prompt() -> None:
    ids: Any = np.array([65, 66])
    assert as_list(ids) == as_inputs(ids) == [[65, 66]]
    assert len(as_list([ids, ids])) == len(as_inputs([ids, ids])) == 2


@pytest.mark.parametrize("wrong", [None, "a", 1.5, -1, 1 << 32])
def test_what_is_no_token_id_is_refused_before_a_vocabulary_is_asked_for_it(wrong: Any) -> None:
    """Scores of a prompt begin with the text of its first token."""
    params = SamplingParams(prompt_logprobs=1)
    with pytest.raises(InvalidRequest, match="must be integers from 0 to 4294967295") as refused:
        Pending("r", TextPrompt(None, [wrong]), params, Letters())  # type: ignore[arg-type]
    assert refused.value.param == "prompt_token_ids"
    Pending("r", TextPrompt(None, [1]), params, Letters())  # type: ignore[arg-type]
