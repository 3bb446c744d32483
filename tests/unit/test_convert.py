"""Contract messages to core messages and back."""

from __future__ import annotations

import random

import pytest

from engine_service.core.messages import Finish, FinishReason, ShownCanvas, Timings, Usage
from engine_service.core.step import Canvas, TokenLogprobs
from engine_service.server.convert import MAX_N, check_hello, to_choices, to_submit
from engine_service.server.convert_out import notice_frame, pack, responses, step_frames
from engine_service.server.outlet import Failure, Outlet, StepRows, halves
from tidemill.runtime.errors import (
    FailedPrecondition,
    InvalidRequest,
    Overloaded,
    Unsupported,
    from_grpc_code,
)
from tidemill.v1 import engine_pb2 as pb

FINISH = Finish(FinishReason.STOP_TOKEN, 2, "", Usage(3, 1, 2, 4, 0, 0), Timings(1, 2, 3, 4))


def test_every_served_field_arrives() -> None:
    spec = pb.GenerateSpec(request_id="r", prompt_token_ids=pack([1, 70_000]), priority=-3)
    spec.sampling.temperature = 0.0
    spec.sampling.top_k = -1
    spec.sampling.logit_bias[7] = -1.5
    spec.sampling.seed = 2**64 - 1
    spec.stop.token_ids.append(9)
    spec.stop.token_sequences.add(token_ids=[1, 2])
    spec.stop.ignore_eos = False
    spec.logprobs.top = 0
    spec.decoding.method = "block_diffusion"
    spec.decoding.params.update({"steps": 4, "threshold": 0.5, "x": {"y": [True, None, "z"]}})
    spec.timeout_ms = 50
    spec.cache_salt, spec.choice, spec.emit_canvas = "salt", 2, True
    spec.pinned.add(position=9, token_id=70_000)
    spec.pinned.add(position=4, token_id=0)
    submit = to_submit(spec)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, -1, None)
    assert (sampling.logit_bias, sampling.seed) == ({7: -1.5}, 2**64 - 1)
    assert (sampling.stop_token_ids, sampling.stop_token_sequences) == ((9,), ((1, 2),))
    assert (sampling.ignore_eos, sampling.logprobs, sampling.prompt_logprobs) == (False, 0, None)
    assert submit.decoding.method == "block_diffusion"
    assert submit.decoding.params == {"steps": 4, "threshold": 0.5, "x": {"y": [True, None, "z"]}}
    assert isinstance(submit.decoding.params["steps"], int)
    assert (submit.priority, submit.cache_salt, submit.choice) == (-3, "salt", 2)
    assert submit.deadline_ns == submit.arrival_ns + 50_000_000
    assert submit.emit_canvas
    assert submit.pinned == ((9, 70_000), (4, 0))


def test_the_smaller_limit_is_the_deadline() -> None:
    spec = pb.GenerateSpec(prompt_token_ids=pack([1]), timeout_ms=50)
    for remaining_s, expected in ((0.01, 10_000_000), (9.0, 50_000_000), (None, 50_000_000)):
        submit = to_submit(spec, remaining_s=remaining_s)
        assert submit.deadline_ns is not None
        assert submit.deadline_ns - submit.arrival_ns == expected
    assert to_submit(pb.GenerateSpec()).deadline_ns is None


UNSERVED = {
    "adapter": pb.GenerateSpec(adapter="a"),
    "kv_transfer": pb.GenerateSpec(kv_transfer={}),
    "media": pb.GenerateSpec(media=[pb.MediaItem()]),
    "dp_rank": pb.GenerateSpec(dp_rank=1),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_unserved_fields_are_named(name: str) -> None:
    with pytest.raises(Unsupported, match=name) as caught:
        to_submit(UNSERVED[name])
    assert caught.value.param == name


def test_every_field_of_the_contract_is_served_or_refused() -> None:
    """A new field must be dealt with here or in convert.py, never ignored."""
    served = {
        "request_id", "prompt_token_ids", "sampling", "decoding", "stop", "logprobs",
        "cache_salt", "priority", "timeout_ms", "traceparent", "tracestate", "choice",
        "emit_canvas", "pinned", "constraint", "reasoning", "fairness_key", "kv_source",
    }  # fmt: skip
    hints = {"prompt_digest", "group"}  # for routers and logs; they ask nothing of an engine
    fields = {field.name for field in pb.GenerateSpec.DESCRIPTOR.fields}
    assert fields == served | hints | {*UNSERVED}


CONSTRAINTS = {
    "json_schema": ({"json_schema": "{}"}, "{}"),
    "json_object": ({"json_object": True}, ""),
    "regex": ({"regex": "a"}, "a"),
    "choice": ({"choice": {"values": ["a", "b"]}}, '["a", "b"]'),
    "ebnf": ({"ebnf": "g"}, "g"),
    "structural_tag": ({"structural_tag": "{}"}, "{}"),
}


def test_what_restricts_the_tokens() -> None:
    assert set(CONSTRAINTS) == {field.name for field in pb.Constraint.DESCRIPTOR.fields}
    for kind, (fields, text) in CONSTRAINTS.items():
        spec = pb.GenerateSpec(constraint=pb.Constraint(**fields))  # type: ignore[arg-type]
        assert to_submit(spec).constraint == (kind, text, None)
        spec.reasoning.start, spec.reasoning.end = "<think>", "</think>"
        assert to_submit(spec).constraint == (kind, text, ("<think>", "</think>", ""))
        spec.reasoning.CopyFrom(pb.Reasoning(lark="start: @answer"))
        assert to_submit(spec).constraint == (kind, text, ("", "", "start: @answer"))
    assert to_submit(pb.GenerateSpec()).constraint is None
    for empty in (pb.Constraint(), pb.Constraint(json_object=False)):
        with pytest.raises(InvalidRequest, match="names no grammar") as caught:
            to_submit(pb.GenerateSpec(constraint=empty))
        assert caught.value.param == "constraint"
    bare = pb.GenerateSpec(reasoning=pb.Reasoning(end="</think>"))
    endless = pb.GenerateSpec(
        constraint=pb.Constraint(regex="a"), reasoning=pb.Reasoning(start="<think>")
    )
    without = pb.GenerateSpec(
        constraint=pb.Constraint(regex="a"), reasoning=pb.Reasoning(lark='start: "a"')
    )
    started = pb.GenerateSpec(
        constraint=pb.Constraint(regex="a"), reasoning=pb.Reasoning(start="a", lark="@answer")
    )
    for spec in (bare, endless, without, started):
        with pytest.raises(InvalidRequest, match="reasoning needs") as caught:
            to_submit(spec)
        assert caught.value.param == "reasoning"
    words = [pb.TokenSequence(token_ids=[1, 2]), pb.TokenSequence(token_ids=[3])]
    sampling = pb.SamplingParams(allowed_token_ids=[4, 5], bad_words=words)
    read = to_submit(pb.GenerateSpec(sampling=sampling)).sampling
    assert (read.allowed_token_ids, read.bad_words) == ((4, 5), ((1, 2), (3,)))


def test_malformed_prompt_and_choices() -> None:
    with pytest.raises(InvalidRequest, match="3 bytes"):
        to_submit(pb.GenerateSpec(prompt_token_ids=b"abc"))
    spec = pb.GenerateSpec(prompt_token_ids=pack([1]))
    for n in (0, MAX_N + 1):
        with pytest.raises(InvalidRequest, match=f"n is {n}"):
            to_choices(pb.GenerateRequest(spec=spec, n=n), None)
    submits = to_choices(pb.GenerateRequest(spec=spec, n=3), None)
    assert [one.choice for one in submits] == [0, 1, 2]
    assert len({one.request_id for one in submits}) == 1
    with pytest.raises(FailedPrecondition, match=r"2\.1"):
        check_hello(pb.Hello(protocol_major=2, protocol_minor=1))


def test_failures_keep_their_details() -> None:
    error = Overloaded("full", retry_after_ms=7, facts={"a": "b"})
    failed = notice_frame(Failure(4, error)).failed
    assert (failed.handle, failed.retriable, failed.retry_after_ms) == (4, True, 7)
    assert dict(failed.metadata) == {"a": "b"}
    assert from_grpc_code(failed.code) is Overloaded


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs((token, token + 1), (-1.0, -2.0), 1)


def step(seq: int, tokens: dict[int, list[int]], ends: tuple[int, ...] = ()) -> StepRows:
    """A step in which every third token has a log-probability and ended handles a finish."""
    handles = list(tokens)
    flat = [token for run in tokens.values() for token in run]
    return StepRows(
        seq=seq,
        handles=handles,
        counts=[len(run) for run in tokens.values()],
        token_ids=pack(flat),
        logprobs=[(i, [entry(t) for t in tokens[h]]) for i, h in enumerate(handles) if h % 3 == 0],
        prompt_logprobs=[(i, 1, [entry(5)]) for i, h in enumerate(handles) if h % 5 == 0],
        finished=[(i, FINISH) for i, h in enumerate(handles) if h in ends],
        canvas=[(0, ShownCanvas(seq, 0, Canvas((seq,), (False,), 0)))] if handles else [],
        opened=[(i, h) for i, h in enumerate(handles) if h % 2 == 0 and seq == 1],
    )


def content(steps: list[StepRows]) -> tuple[dict, dict, list, list]:
    """Tokens, log-probability tokens, ends and beginnings by handle, in order."""
    tokens: dict[int, bytes] = {}
    logged: dict[int, list[int]] = {}
    ends: list[int] = []
    opened: list[tuple[int, int]] = []
    for rows in steps:
        offset = 0
        for handle, count in zip(rows.handles, rows.counts, strict=True):
            part = rows.token_ids[offset : offset + 4 * count]
            tokens[handle] = tokens.get(handle, b"") + part
            offset += 4 * count
        assert offset == len(rows.token_ids)
        for row, entries in rows.logprobs:
            if entries:
                found = [e.token_ids[0] for e in entries if e]
                logged.setdefault(rows.handles[row], []).extend(found)
        ends += [rows.handles[row] for row, _ in rows.finished]
        opened += [(rows.handles[row], cached) for row, cached in rows.opened]
    return tokens, logged, sorted(ends), sorted(opened)


def random_steps(rng: random.Random) -> list[StepRows]:
    live, steps = set(range(1, 10)), []
    for seq in range(1, rng.randint(2, 12)):
        rows = {h: [rng.randrange(99) for _ in range(rng.randint(0, 4))] for h in sorted(live)}
        ends = tuple(h for h in live if rng.random() < 0.2)
        steps.append(step(seq, rows, ends))
        live -= set(ends)
    return steps


@pytest.mark.parametrize("seed", range(30))
async def test_coalescing_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    outlet, steps, taken = Outlet(), random_steps(rng), []
    for one in steps:
        outlet.put(one)
        if rng.random() < 0.3:
            taken += await outlet.take()
    outlet.close()
    while items := await outlet.take():
        taken += items
    assert content(taken) == content(steps), f"seed {seed}"
    assert len(outlet) == 0


async def test_the_coalescing_check_notices_a_lost_step() -> None:
    """Negative control of the test above."""
    steps = random_steps(random.Random(3))
    assert content(steps[1:]) != content(steps)


async def test_memory_of_an_unread_outlet_is_bounded_by_handles() -> None:
    outlet = Outlet()
    for seq in range(1000):
        outlet.put(step(seq, {handle: [1] for handle in range(1, 6)}))
    assert len(outlet) == 5
    (rows,) = await outlet.take()
    assert isinstance(rows, StepRows)
    assert rows.counts == [1000] * 5
    assert [shown.canvas.token_ids for _, shown in rows.canvas] == [(999,)]


@pytest.mark.parametrize("seed", range(10))
def test_halves_keep_everything(seed: int) -> None:
    whole = random_steps(random.Random(seed))[0]
    assert content(list(halves(whole))) == content([whole])
    lone = step(1, {3: [1, 2, 3, 4, 5]}, (3,))
    first, second = halves(lone)
    assert content([first, second]) == content([lone])
    assert not first.finished


def test_large_steps_are_split() -> None:
    big = step(1, {handle: [7] * 100_000 for handle in (1, 2, 4)}, (4,))
    frames = list(step_frames(big._replace(canvas=[])))
    assert len(frames) == 1
    many = step(1, {handle: [7] * 100_000 for handle in (1, 2, 4, 3)}, (4,))
    frames = list(step_frames(many))
    assert all(frame.ByteSize() <= 4 << 20 for frame in frames)
    assert sum(sum(frame.step.counts) for frame in frames) == 400_000
    assert sum(len(frame.step.finished) for frame in frames) == 1
    logged = [p for frame in frames for row in frame.step.logprobs for p in row.positions]
    assert len(logged) == 100_000


@pytest.mark.parametrize("max_bytes", [300, 4096, 64 << 10])
def test_steps_and_responses_fit_a_smaller_limit(max_bytes: int) -> None:
    rows = step(1, {handle: [7] * 5000 for handle in (1, 2)}, (2,))
    frames = list(step_frames(rows, max_bytes))
    assert max(frame.ByteSize() for frame in frames) <= max_bytes
    assert sum(sum(frame.step.counts) for frame in frames) == 10_000
    assert sum(len(frame.step.finished) for frame in frames) == 1
    answers = list(responses(step(1, {0: [7] * 5000}, (0,)), max_bytes))
    assert max(one.ByteSize() for one in answers) <= max_bytes
    assert b"".join(one.token_ids for one in answers) == pack([7] * 5000)


def test_many_rows_that_end_fit_a_smaller_limit() -> None:
    """Their finishes are more than their tokens."""
    rows = step(1, {handle: [7] for handle in range(200)}, tuple(range(200)))
    rows = rows._replace(logprobs=[], prompt_logprobs=[], canvas=[])
    frames = list(step_frames(rows, 8192))
    assert max(frame.ByteSize() for frame in frames) <= 8192
    assert sum(len(frame.step.finished) for frame in frames) == 200


def test_what_cannot_be_cut_is_sent_whole() -> None:
    for rows in (step(1, {1: [7]}, (1,)), slow_reader(1)._replace(handles=[1], counts=[0])):
        frames = list(step_frames(rows, 1))
        assert sum(len(frame.step.finished) for frame in frames) == len(rows.finished)
    assert list(responses(step(1, {0: [7]}, (0,)), 1))[-1].token_ids == pack([7])


def slow_reader(num_scores: int) -> StepRows:
    """What a reader that slept has to get: many scores of its prompt, and tokens behind them."""
    scores = [TokenLogprobs(tuple(range(20)), (-1.0,) * 20, 1)] * num_scores
    rows = step(1, {0: [1, 2, 3], 1: [4]}, (0, 1))
    return rows._replace(canvas=[], prompt_logprobs=[(0, 1, scores)])


@pytest.mark.parametrize("num_scores", [3, 60_000])
def test_large_generate_responses_are_split(num_scores: int) -> None:
    answers = list(responses(slow_reader(num_scores)))
    assert (len(answers) > 2) == (num_scores > 3)
    assert all(one.ByteSize() <= 4 << 20 for one in answers)
    at, tokens = 1, b""
    for one in (one for one in answers if one.index == 0):
        if one.prompt_logprobs:
            assert one.prompt_logprobs_start == at
            assert not tokens, "a token came before the prompt was scored"
        at += len(one.prompt_logprobs)
        tokens += one.token_ids
    assert (at, tokens) == (num_scores + 1, pack([1, 2, 3]))
    assert [one.index for one in answers if one.HasField("finish")] == [0, 1]


def test_scores_of_a_prompt_go_before_tokens_in_a_session_too() -> None:
    frames = [frame.step for frame in step_frames(slow_reader(60_000))]
    assert len(frames) > 1
    first = next(i for i, one in enumerate(frames) if any(one.counts))
    assert not any(one.prompt_logprobs for one in frames[first + 1 :])


def test_long_names_are_refused_with_their_length() -> None:
    for name, most in (("cache_salt", 1024), ("request_id", 256)):
        to_submit(pb.GenerateSpec(**{name: "é" * most}))
        with pytest.raises(InvalidRequest, match=f"{name} has {most + 1} .* {most}") as caught:
            to_submit(pb.GenerateSpec(**{name: "é" * (most + 1)}))
        assert caught.value.param == name


def test_generate_responses() -> None:
    answers = list(responses(step(1, {0: [4, 5], 1: [6]}, (1,))))
    assert [(one.index, one.token_ids) for one in answers] == [(0, pack([4, 5])), (1, pack([6]))]
    assert answers[0].prompt_logprobs_start == 1
    assert not answers[0].HasField("finish")
    assert answers[1].finish.stop_token_id == 2
    assert answers[1].finish.usage.cached_tokens == 1


def test_failures_that_repeat_what_was_sent_are_cut() -> None:
    """A frame that is too long to be sent would end the session, and all requests in it."""
    error = InvalidRequest("m" * 10**6, param="p" * 10**6, facts={"a": "b" * 10**6})
    failed = notice_frame(Failure(4, error)).failed
    assert failed.message.startswith("mmm")
    assert failed.param.startswith("ppp")
    assert failed.metadata["a"].startswith("bbb")
    assert failed.ByteSize() < 4000
