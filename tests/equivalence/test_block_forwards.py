"""benchmarks.block_forwards: it finds the steps that it times, with blocks of any length."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks import block_forwards
from tests.equivalence.shapes import SHAPES


@pytest.mark.parametrize(("shape", "blocks"), [("sdar", [1, 4]), ("qwen3", [1])])
def test_steps_of_whole_blocks_are_found(shape: str, blocks: list[int], tmp_path: Path) -> None:
    """All requests begin in one step, although their prompts take several."""
    path, out = tmp_path / "config.json", tmp_path / "figures.json"
    path.write_text(json.dumps(SHAPES[shape].config))
    timed: list[list[float]] = []

    def time_steps(*asked: Any, real: Any = block_forwards.time_steps) -> list[float]:
        timed.append(real(*asked))
        return timed[-1]

    flags = [
        f"--shape={path}",
        f"--blocks={','.join(map(str, blocks))}",
        "--requests=2,40",
        "--context=64",
    ]
    with patch.object(block_forwards, "time_steps", time_steps):
        assert block_forwards.main([*flags, f"--json={out}"]) == 0
    found = json.loads(out.read_text())["ms"]
    assert {int(block) for block in found} == set(blocks)
    assert all(ms > 0 for row in found.values() for ms in row.values())
    assert [len(times) for times in timed] == [block_forwards._STEPS] * 2 * len(blocks)


def test_a_call_is_told_by_the_step_it_waits_for() -> None:
    """Steps overlap: each call launches one and waits for the one before."""
    executor = SimpleNamespace(launch=lambda plan: plan, collect=lambda handle: handle)
    llm: Any = SimpleNamespace(engine=SimpleNamespace(executor=executor))
    plans = [
        SimpleNamespace(num_spans=2 + steady, own_spans=[SimpleNamespace(num_tokens=size)] * 2)
        for size, steady in ((4, 0), (8, 3), (4, 0))
    ]
    told, early = [], executor.launch(SimpleNamespace())
    with block_forwards.watched_sizes(llm) as collected:
        for ahead, plan in zip([early, *plans], [*plans, None], strict=True):
            collected.clear()
            if plan is not None:
                executor.launch(plan)
            executor.collect(ahead)
            told.append(list(collected))
    assert told == [[0], [8], [19], [8]]


def test_a_late_step_and_the_short_one_behind_it_count_as_two() -> None:
    times = [23.6, 15.9, 19.3] * 8
    assert block_forwards.middle_mean(times) == pytest.approx(19.6, abs=0.3)
    assert block_forwards.middle_mean([*times, 204.3]) == pytest.approx(19.6, abs=0.3)
    assert block_forwards.middle_mean([23.6, 15.9] * 8) == pytest.approx(19.75)
