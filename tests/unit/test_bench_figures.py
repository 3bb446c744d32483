"""The figures of `bench serve` against answers whose figures can be told by hand."""

from __future__ import annotations

import array
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine_service.config import EngineConfig
from tidemill.bench import serve
from tidemill.bench.engines import NOT_MEASURED, NOT_SERVED
from tidemill.bench.traffic.answer import OK, Answer
from tidemill.bench.traffic.figures import Slo, Window, figures
from tidemill.bench.traffic.options import ServeOptions, points_of
from tidemill.bench.traffic.picture import draw
from tidemill.runtime.errors import InvalidRequest, Unsupported

WINDOW = Window(100.0, 110.0)


def answer(due: float, *chunks: float, tokens: int = 0, status: str = OK, **more: Any) -> Answer:
    """Chunks and the end are seconds after `due`; the end is with the last chunk."""
    made = Answer(due, begun=due, status=status, output_tokens=tokens or len(chunks), **more)
    made.chunks = array.array("d", [due + at for at in chunks])
    made.ended = made.ended or due + (chunks[-1] if chunks else 0.25)
    return made


def test_latencies_count_from_when_a_request_was_due() -> None:
    """A generator that comes a second late shows it in every latency, and names it."""
    late = answer(100.0, 1.5, 1.75, 2.0)
    late.begun = 101.0
    found = figures([late], WINDOW, Slo())
    assert found["ttft_ms"]["p50"] == 1500
    assert found["e2e_ms"]["p99"] == 2000
    assert found["lag_ms"]["p50"] == 1000
    assert found["tpot_ms"]["p50"] == 250


def test_latencies_are_of_requests_due_in_the_window_and_rates_of_what_came_in_it() -> None:
    before = answer(95.0, 4.0, 6.0)  # ends in the window, with one of its two tokens
    within = answer(101.0, 0.5, 1.0, 1.5)
    behind = answer(109.0, 0.5, 8.0)  # ends behind it
    found = figures([before, within, behind, answer(111.0, 0.1)], WINDOW, Slo())
    assert (found["requests"], found["ok"], found["begun_per_s"]) == (2, 2, 0.2)
    assert found["answered_per_s"] == 0.2, "before and within"
    assert found["output_tokens_per_s"] == 0.5, "1 + 3 + 1 tokens in 10 s"
    assert found["ttft_ms"] == {"p50": 500, "p90": 500, "p95": 500, "p99": 500}
    assert found["itl_ms"]["p50"] == 500
    assert found["itl_ms"]["p99"] == 7500


def test_chunks_of_several_tokens() -> None:
    """Blocks of eight, one every 400 ms: 16 tokens follow the first chunk, 23 the first token."""
    found = figures([answer(100.0, 1.0, 1.4, 1.8, tokens=24)], WINDOW, Slo())
    assert found["tokens_per_chunk"] == 8
    assert found["tpot_ms"]["p50"] == pytest.approx(800 / 23, abs=0.001)
    assert found["itl_ms"]["p50"] == pytest.approx(400, abs=0.001)
    assert found["output_tokens_per_s"] == 2.4


def test_answers_without_a_second_chunk_have_no_pace() -> None:
    found = figures([answer(100.0, 1.0), answer(101.0, 1.0, tokens=5)], WINDOW, Slo(tpot_ms=1))
    assert found["tpot_ms"] == found["itl_ms"] == {}
    assert found["good_share"] == 1.0
    silent = answer(100.0, status=OK, tokens=3)
    assert figures([silent], WINDOW, Slo())["ttft_ms"]["p50"] == 250, "its end is its first news"


def test_refusals_are_failures_with_a_latency_of_their_own() -> None:
    answers = [
        answer(101.0, status="429", said="full"),
        answer(102.0, status="RESOURCE_EXHAUSTED"),
        answer(103.0, 0.5, status="UNAVAILABLE"),
        answer(104.0, status="500"),
        answer(105.0, 0.5, 0.6),
    ]
    found = figures(answers, WINDOW, Slo(ttft_ms=1e6))
    assert (found["requests"], found["ok"]) == (5, 1)
    assert found["failures"]["429"] == {"requests": 1, "said": "full"}
    assert sum(one["requests"] for one in found["failures"].values()) == 4
    assert found["refused"]["requests"] == 2, "neither what had begun nor an error"
    assert found["refused"]["ms"]["p99"] == 250
    assert found["e2e_ms"]["p99"] == pytest.approx(600), "failures are in no other latency"
    assert found["goodput_per_s"] == 0.1


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=500), 2),
        (Slo(ttft_ms=499), 1),
        (Slo(tpot_ms=100), 1),
        (Slo(e2e_ms=700), 2),
        (Slo(e2e_ms=599), 1),
        (Slo(ttft_ms=500, tpot_ms=100), 1),
        (Slo(ttft_ms=400, tpot_ms=100), 0),
    ],
)
def test_goodput_counts_what_keeps_every_bound(slo: Slo, good: int) -> None:
    answers = [answer(101.0, 0.5, 0.6), answer(102.0, 0.25, 0.5), answer(103.0, status="500")]
    found = figures(answers, WINDOW, slo)
    assert found["goodput_per_s"] == good / 10
    assert found["good_share"] == pytest.approx(good / 3, abs=1e-4)
    assert "goodput_per_s" not in figures(answers, WINDOW, Slo())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rate": "1,x"}, "rate: '1,x' is not a list of numbers"),
        ({"rate": "0"}, "above 0"),
        ({"rate": "inf"}, "above 0"),
        ({"concurrency": "1.5"}, "not a list of whole numbers"),
        ({"rate": "1", "concurrency": "2"}, "choose one of rate and concurrency"),
        ({"trace_file": "x", "seconds": 3.0}, "played to its end"),
        ({"arrival_cv": -1.0}, "arrival_cv is -1.0; at least 0"),
        ({"concurrency": "2", "arrival_cv": 2.0}, "arrival_cv is for rate, and the load is by"),
        ({"rate": "1", "speed": "2"}, "speed is for trace_file, and the load is by rate"),
        ({"length_spread": 1.5}, "length_spread is 1.5; at most 1"),
        ({"vocab_size": 70_000}, "vocab_size is 70000; at most 65536"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0; it has to be above 0"),
        ({"slo_ttft_ms": -1.0}, "slo_ttft_ms is -1.0"),
        ({"url": "127.0.0.1:8000"}, "does not begin with http"),
        ({"api_key": "schl\u00fcssel"}, "api_key: character 5 of 9 is not printable ASCII"),
        ({"url": "http://127.0.0.1:1", "shape": "qwen3-8b"}, "shape is for services"),
        ({"url": "http://127.0.0.1:1", "data_parallel_size": 2}, "data_parallel_size is for"),
    ],
)
def test_values_that_cannot_work_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        points_of(ServeOptions(**values))


def test_engine_flags_and_a_url_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="max_rows is for services that this starts"):
        serve.run(ServeOptions(url="http://127.0.0.1:1"), EngineConfig(max_rows=3))


def test_a_trace_ends_a_mean_gap_behind_its_last_arrival(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("".join(f'{{"t_s": {at}, "input_len": 3}}\n' for at in (4, 5, 6)))
    options = ServeOptions(trace_file=str(path), speed="1,2", warm_up_s=0.5)
    _, points = points_of(options)
    assert [point.until_s for point in points] == [3, 1.5]
    assert [list(point.starts) for point in points] == [[0, 1, 2], [0, 0.5, 1]]
    with pytest.raises(InvalidRequest, match=r"over after 3.0 s"):
        points_of(ServeOptions(trace_file=str(path), warm_up_s=3.0))


def test_a_picture_has_a_mark_for_every_point(tmp_path: Path) -> None:
    good = figures([answer(101.0, 0.5, 0.6)], WINDOW, Slo(ttft_ms=1)) | {"load": 1}
    refused = figures([answer(101.0, status="429")], WINDOW, Slo(ttft_ms=1)) | {"load": 2}
    draw([good, refused], "requests per second", str(tmp_path / "both.png"))
    draw([good], "requests per second", str(tmp_path / "one.png"))
    both, one = (tmp_path / name for name in ("both.png", "one.png"))
    assert both.read_bytes().startswith(b"\x89PNG")
    assert both.read_bytes() != one.read_bytes()


def test_a_picture_without_matplotlib_is_refused_before_any_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ServeOptions(url="http://127.0.0.1:1", plot="x.png")
    with pytest.raises(Unsupported, match=r"pip install 'tidemill\[plot\]'"):
        serve.run(options, EngineConfig())


def test_help_loads_neither_grpc_nor_an_http_client() -> None:
    """So that it is there at once."""
    command = (
        "import sys, tidemill.bench.serve\n"
        "assert not {'grpc', 'httpx', 'rich', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


def test_hidden_flags_are_flags() -> None:
    assert {field.name for field in fields(EngineConfig)} >= NOT_MEASURED > NOT_SERVED
