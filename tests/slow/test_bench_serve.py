"""`tidemill bench serve` from end to end: services that it starts, a simulated model, a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_bench_runs import SHAPE
from tidemill.commands import bench

STEP_MS, OUTPUT_LEN, INPUT_LEN = 20, 40, 16


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_simulated_engine_gives_the_figures_that_it_must(tmp_path: Path, protocol: str) -> None:
    """A step of 20 ms: every request gets 50 tokens a second, however many there are."""
    shape, file, picture = (tmp_path / name for name in ("config.json", "f.json", "p.png"))
    shape.write_text(json.dumps(SHAPE | {"vocab_size": 12_000}))
    words = {
        "shape": shape,
        "executor": "simulated",
        "simulated-step-ms": STEP_MS,
        "protocol": protocol,
        "rate": "4,8",
        "arrival-cv": 0.5,
        "seconds": 6,
        "warm-up-s": 2,
        "input-len": INPUT_LEN,
        "output-len": OUTPUT_LEN,
        "frontends": 2,
        "clients": 2,
        "slo-tpot-ms": 1.5 * STEP_MS,
        "plot": picture,
        "json": file,
    }
    # A machine that stands still for half a second makes a tenth of them late; a wrong formula is
    # wrong every time.
    for attempt in reversed(range(4)):
        assert bench.run(["serve", *(f"--{name}={value}" for name, value in words.items())]) == 0
        found = json.loads(file.read_text())
        try:
            check_times(found["points"])
            break
        except AssertionError:
            if not attempt:
                raise
    assert found["benchmark"] == "serve"
    assert found["engine_options"] == {"executor": "simulated", "simulated_step_ms": STEP_MS}
    for point in found["points"]:
        assert point["failures"] == {}
        assert point["ok"] == point["requests"] > 6
    first, second = found["points"]
    assert (first["load"], second["load"]) == (4, 8)
    assert picture.read_bytes().startswith(b"\x89PNG")


def check_times(points: list[dict[str, Any]]) -> None:
    """They follow from the step."""
    for point in points:
        assert point["tpot_ms"]["p50"] == pytest.approx(STEP_MS, rel=0.1)
        assert point["itl_ms"]["p50"] == pytest.approx(STEP_MS, rel=0.25)
        assert point["tokens_per_chunk"] == pytest.approx(1, abs=0.3)
        # The prompt takes the rest of the step that runs and one or two of its own.
        assert STEP_MS <= point["ttft_ms"]["p50"] < 10 * STEP_MS
        least_ms = (OUTPUT_LEN - 1) * STEP_MS
        assert least_ms <= point["e2e_ms"]["p50"] < 1.5 * least_ms
        shares = point["output_tokens_per_s"] / point["input_tokens_per_s"]
        assert shares == pytest.approx(OUTPUT_LEN / INPUT_LEN, rel=0.5)
        assert point["good_share"] > 0.9
    first, second = points
    assert second["begun_per_s"] > first["begun_per_s"]
