"""`tidemill bench online` from end to end: real processes, a simulated model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_bench_runs import SHAPE
from tidemill.commands import bench

REQUESTS, INPUT_LEN, OUTPUT_LEN, STEP_MS = 24, 20, 50, 20


@pytest.mark.slow
@pytest.mark.alone
def test_online_beside_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two frontends carry the simulated rate; every process says what it spent. The model knows
    fewer ids than prompts are drawn from."""
    shape, file = tmp_path / "config.json", tmp_path / "figures.json"
    shape.write_text(json.dumps(SHAPE | {"vocab_size": 1_000}))
    words = {
        "shape": shape,
        "executor": "simulated",
        "simulated-step-ms": STEP_MS,
        "requests": REQUESTS,
        "input-len": INPUT_LEN,
        "output-len": OUTPUT_LEN,
        "concurrency": 8,
        "frontends": 2,
        "repeats": 1,
        "json": file,
    }
    for attempt in reversed(range(3)):  # one in which the machine stood still says nothing of us
        assert bench.run(["online", *(f"--{name}={value}" for name, value in words.items())]) == 0
        found = json.loads(file.read_text())
        try:
            check_pace(found["sets"][0])
            break
        except AssertionError:
            if not attempt:
                raise
    (row,) = found["sets"]
    assert (found["max_rows"], row["output_tokens"]) == (8, REQUESTS * OUTPUT_LEN)
    assert row["ratio"] == pytest.approx(row["offline"]["seconds"] / row["online"]["seconds"], 0.01)
    online = row["online"]
    roles = {"supervisor", "engine server", "rank 0", "frontend 0", "frontend 1", "busiest client"}
    assert online["cpu_share"].keys() == online["cpu_us_per_token"].keys() == roles
    assert "of offline" in capsys.readouterr().out


def check_pace(row: dict[str, Any]) -> None:
    """That of the simulated steps, which other programs of the machine can only slow down."""
    least_s = REQUESTS / 8 * OUTPUT_LEN * STEP_MS / 1000
    for kind in ("offline", "online"):
        assert least_s <= row[kind]["seconds"] < 3 * least_s
    assert row["online"]["between_deliveries_ms"]["p50"] == pytest.approx(STEP_MS, rel=0.5)
