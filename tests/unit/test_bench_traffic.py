"""The parts of `bench serve` that need no server: arrivals, requests, what a stream said."""

from __future__ import annotations

import json
import random
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.bench.traffic.answer import OK, Answer
from tidemill.bench.traffic.arrivals import gaps, played, starts
from tidemill.bench.traffic.asked import Drawn, Lengths, Played, read_trace
from tidemill.bench.traffic.client import Share, shares
from tidemill.bench.traffic.http_face import EventReader
from tidemill.bench.traffic.target import Target
from tidemill.runtime.errors import InvalidRequest

MANY = 20_000
TARGET = Target(
    urls=("http://h",),
    is_grpc=False,
    is_chat=False,
    model="m",
    temperature=0.0,
    ignore_eos=True,
    timeout_s=1.0,
    api_key="secret",
)


def fits(found: list[float], rate: float, cv: float) -> bool:
    """Mean and coefficient of variation, within six standard errors of the widest process here."""
    mean = statistics.fmean(found)
    return (
        abs(mean * rate - 1) < 0.13 and abs(statistics.stdev(found) / mean - cv) < 0.2 * cv + 1e-9
    )


@settings(max_examples=25)
@given(st.floats(0.01, 1000), st.floats(0.1, 3), st.integers(0, 2**32))
def test_gaps_have_the_rate_and_the_variation_asked_for(rate: float, cv: float, seed: int) -> None:
    assert fits(list(islice(gaps(rate, cv, random.Random(seed)), MANY)), rate, cv)


def test_other_processes_do_not_fit(seed: int) -> None:
    """The control of the test above."""
    poisson = list(islice(gaps(5, 1, random.Random(seed)), MANY))
    assert fits(poisson, 5, 1)
    assert not fits(poisson, 5, 2)
    assert not fits(poisson, 7, 1)
    assert not fits([0.2] * MANY, 5, 1)


@given(st.floats(1, 200), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 2**32))
def test_arrivals_stay_within_their_time_and_come_at_their_rate(
    rate: float, cv: float, seed: int
) -> None:
    until_s = 2000 / rate
    found = starts(rate, cv, until_s, random.Random(seed))
    assert found == sorted(found)
    assert all(0 <= at < until_s for at in found)
    # The number of arrivals has about cv^2 times its mean as variance.
    assert abs(len(found) - 2000) <= 7 * cv * 2000**0.5 + 2
    assert found == starts(rate, cv, until_s, random.Random(seed))


def test_an_even_process_is_even() -> None:
    found = starts(10, 0, 3, random.Random(1))
    assert len(found) in (29, 30, 31)
    assert all(then - now == pytest.approx(0.1) for now, then in pairwise(found))


@given(st.lists(st.floats(0, 100), max_size=40).map(sorted), st.integers(1, 5))
def test_processes_together_begin_what_one_would(times: list[float], count: int) -> None:
    whole = Share(
        target=TARGET,
        source=DRAWN,
        starts=times,
        numbers=range(len(times)),
        streams=count + 3,
    )
    dealt = list(shares(whole, count))
    pairs = [pair for one in dealt for pair in zip(one.numbers, one.starts, strict=True)]
    assert sorted(pairs) == list(enumerate(times))
    assert sum(one.streams for one in dealt) == count + 3
    assert sorted(one.first for one in dealt) == list(range(count))


DRAWN = Drawn(Lengths(20, 10, 0.5), 100, is_chat=False, seed="1/0")


def test_requests_are_the_same_again_and_differ_among_each_other() -> None:
    taken = [DRAWN.take(number) for number in range(200)]
    assert taken == [DRAWN.take(number) for number in range(200)]
    assert len({tuple(one.prompt) for one in taken}) == 200
    assert {len(one.prompt) for one in taken} == set(range(10, 31))
    assert {one.output_len for one in taken} == set(range(5, 16))
    assert all(type(token) is int and 0 <= token < 100 for one in taken for token in one.prompt)
    assert taken[0] != DRAWN._replace(seed="1/1").take(0), "another point has the same prompts"
    chat = DRAWN._replace(is_chat=True, lengths=Lengths(20, 10, 0)).take(3)
    assert chat.messages is not None
    assert len(chat.messages[0]["content"].split()) == 20


def test_a_trace_is_played_in_order_and_as_fast_as_wanted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"t_s": 9.0, "prompt": "tide", "output_len": 3},
        {"t_s": 5.0, "input_len": 7, "output_len": 2},
        {"t_s": 5.5, "input_len": 4},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_trace(str(path), is_chat=False, output_len=11)
    assert played([line["t_s"] for line in found], 2.0) == [0.0, 0.25, 2.0]
    asked = [Played(found, DRAWN).take(number) for number in range(3)]
    assert [one.output_len for one in asked] == [2, 11, 3]
    assert [len(one.prompt) for one in asked] == [7, 4, 4]
    assert asked[2].prompt == "tide"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"input_len": 3}', "t_s has to be"),
        ('{"t_s": -1, "input_len": 3}', "t_s has to be"),
        ('{"t_s": 0}', "one of input_len"),
        ('{"t_s": 0, "input_len": 3, "prompt": "x"}', "one of input_len"),
        ('{"t_s": 0, "input_len": 0}', "input_len has to be"),
        ('{"t_s": 0, "prompt": [3]}', "prompt has to be a text"),
        ('{"t_s": 0, "prompt": null}', "prompt has to be a text"),
        ('{"t_s": 0, "input_len": true}', "input_len has to be"),
        ('{"t_s": 0, "input_len": 3, "output_len": 1.5}', "output_len has to be"),
        ('{"t_s": 0, "messages": []}', "messages is for --api chat"),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"t_s": 0, "input_len": 1}\n' + line)
    with pytest.raises(InvalidRequest, match=f"line 2: {words}"):
        read_trace(str(path), is_chat=False, output_len=1)


def test_no_trace_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_trace(str(tmp_path / "none"), is_chat=False, output_len=1)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidRequest, match="no requests"):
        read_trace(str(tmp_path / "empty"), is_chat=False, output_len=1)


EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": 'a\n\ndata: [DONE]\n"é'}}]},
    {"choices": [{"delta": {"reasoning_content": "hm"}}], "usage": None},
    {"choices": [{"text": "b"}]},
    {"choices": [{"delta": {}, "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}},
]
"""Three of them bring something."""


def stream(*events: object, end: str = "[DONE]", line: str = "\n") -> bytes:
    texts = [json.dumps(event, ensure_ascii=False) for event in events] + [end] * bool(end)
    return (": comment" + 2 * line + "".join(f"data: {one}{2 * line}" for one in texts)).encode()


def read(body: bytes, cuts: list[int], status: int = 200, *, is_whole: bool = True) -> Answer:
    answer = Answer(0.0)
    reader = EventReader(answer)
    for number, (begin, end) in enumerate(pairwise([0, *sorted(cuts), len(body)])):
        reader.feed(body[begin:end], float(number))
    reader.finish(status, is_whole=is_whole)
    return answer


@given(st.lists(st.integers(0, 400), max_size=30), st.sampled_from(["\n", "\r\n"]))
def test_a_stream_is_read_however_it_is_cut(cuts: list[int], line: str) -> None:
    body = stream(*EVENTS, line=line)
    answer = read(body, [cut % len(body) for cut in cuts])
    assert (answer.status, answer.input_tokens, answer.output_tokens) == (OK, 4, 9)
    assert len(answer.chunks) == 3
    assert list(answer.chunks) == sorted(answer.chunks)


def test_what_went_wrong_is_told_apart() -> None:
    ended = read(stream(*EVENTS, end=""), [])
    assert ended.status == "cut off"
    assert read(stream(*EVENTS, end=""), [], is_whole=False).status == "connection"
    error = {"error": {"message": "too many", "type": "overloaded_error", "code": "queue_full"}}
    failed = read(stream(EVENTS[1], error), [])
    assert (failed.status, failed.said, failed.is_refused) == ("queue_full", "too many", False)
    refused = read(json.dumps(error).encode(), [], status=429)
    assert (refused.status, refused.said, refused.is_refused) == ("429", "too many", True)
    assert read(b"<html>", [], status=502).said == "<html>"
    assert not read(b"<html>", [], status=502).is_refused
    assert read(stream(EVENTS[3]), []).output_tokens == 1, "chunks stand in for missing usage"
    assert read(b"data: {\n\n", []).status == "not JSON"


def test_no_key_in_what_is_shown() -> None:
    assert "secret" not in repr(TARGET)
