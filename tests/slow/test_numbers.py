"""The figures that were promised, measured by the benchmarks as a user runs them.

Speed is asked up to three times, as other programs may use the machine; quality once, as it is
the same every time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)
ATTEMPTS = 3
ITEMS = 2000
THREADS = 2
STRUCTURED = ("add", "reverse", "sort", "count", "repeat", "json", "lookup")


def bench(folder: Path, name: str, *flags: str, threads: int = THREADS) -> dict[str, Any]:
    """One run of `tidemill bench`; prints its table."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", "tidemill", "bench", name, f"--json={file}", *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    print(name, *flags, done.stdout, sep="\n")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(file.read_text()))


def missed(figures: dict[str, Any], bars: dict[str, Callable[[float], bool]]) -> dict[str, float]:
    """Figures that do not reach their bar."""
    return {name: figures[name] for name, holds in bars.items() if not holds(figures[name])}


def attempts(measure: Callable[[], dict[str, Any]], bars: dict[str, Any]) -> list[dict[str, float]]:
    """What was missed in every attempt, up to the first that misses nothing."""
    found: list[dict[str, float]] = []
    while len(found) < ATTEMPTS and (not found or found[-1]):
        figures = measure()
        print(f"attempt {len(found) + 1}:", {name: figures[name] for name in bars})
        found.append(missed(figures, bars))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags", "exact", "per_forward"),
    [("demo", (), 0.95, 0.0), ("demo-block", ('--params={"threshold": 0.9}',), 0.90, 3.0)],
)
def test_quality(
    tmp_path: Path, model: str, flags: tuple[str, ...], exact: float, per_forward: float
) -> None:
    asked = ("quality", f"--model={model}", f"--items={ITEMS}", *flags)
    # Answers are asked for here, not speed: beside other tests a second thread spins for its turn.
    figures = bench(tmp_path, *asked, threads=1)
    every = figures["tasks"]["all"]
    assert every["items"] == ITEMS
    assert figures["tasks"].keys() == {*STRUCTURED, "all"}
    assert every["exact_match"] >= exact, figures["tasks"]
    assert every["tokens_per_forward"] >= per_forward, figures["tasks"]


@pytest.mark.slow
@pytest.mark.alone
def test_the_stack_delivers_what_its_model_computes(tmp_path: Path) -> None:
    """256 requests at 5 ms a step; a Session costs the server a sixth of one RPC per request."""
    bars: dict[str, Callable[[float], bool]] = {
        "ratio_to_ideal": lambda ratio: ratio >= 0.85,
        "core_host_ms_per_step": lambda spent: spent <= 2.0,
        "generate_to_session_server_cpu": lambda ratio: ratio >= 6.0,
    }
    tries = attempts(lambda: bench(tmp_path, "stack"), bars)
    assert not tries[-1], f"missed: {tries}"


@pytest.mark.slow
@pytest.mark.alone
def test_a_frontend_carries_streams(tmp_path: Path) -> None:
    """Tokens per second in one process, and that the clients who counted them had time to spare.

    Nothing is asked of half loads here, at which clients have more of it."""

    def measure() -> dict[str, Any]:
        figures = bench(tmp_path, "frontend", "--frontends=1", "--no-halves")["1_frontend"]
        clients = [load["cpu_share"]["busiest client"] for load in figures.values()]
        return {
            "SSE": figures["SSE streams"]["tokens_per_s"],
            "gRPC": figures["gRPC streams"]["tokens_per_s"],
            "client": max(clients),
        }

    bars: dict[str, Callable[[float], bool]] = {
        "SSE": lambda rate: rate >= 25_000,
        "gRPC": lambda rate: rate >= 25_000,
        "client": lambda share: share <= 0.7,
    }
    tries = attempts(measure, bars)
    assert not tries[-1], f"missed: {tries}"


@pytest.mark.slow
def test_a_frontend_is_measured_at_half_loads_too(tmp_path: Path) -> None:
    """For a moment, as nothing is said of speed; an answer that is not whole ends the benchmark."""
    few = ("--seconds=1", "--streams=8", "--concurrency=4")
    found = bench(tmp_path, "frontend", "--frontends=1", *few)["1_frontend"]
    unary, streams = ("unary HTTP", "unary gRPC"), ("SSE streams", "gRPC streams")
    halves = [f"{name}, half" for name in unary]
    halves += [f"{name}, half as {how}" for name in streams for how in ("many", "fast")]
    assert list(found) == [*unary, *streams, *halves]
    for name in found:
        assert found[name]["tokens_per_s"] > 0, name


@pytest.mark.slow
@pytest.mark.alone
def test_demo_is_as_fast_as_its_peer(tmp_path: Path) -> None:
    bars: dict[str, Callable[[float], bool]] = {"ratio_to_peer": lambda ratio: ratio >= 1.0}
    flags = ("--model=demo", f"--threads={THREADS}")
    tries = attempts(lambda: bench(tmp_path, "throughput", *flags), bars)
    assert not tries[-1], f"missed: {tries}"


def test_control_a_slow_machine_is_asked_three_times_and_no_more() -> None:
    speeds = iter([0.5, 0.9, 0.99, 1.5])
    bars: dict[str, Callable[[float], bool]] = {"speed": lambda speed: speed >= 1.0}
    assert attempts(lambda: {"speed": next(speeds)}, bars) == [
        {"speed": 0.5},
        {"speed": 0.9},
        {"speed": 0.99},
    ]
    assert attempts(lambda: {"speed": next(speeds)}, bars) == [{}]
