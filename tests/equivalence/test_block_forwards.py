"""benchmarks.block_forwards: it finds the steps that it times, with blocks of any length."""

from __future__ import annotations

import json
from pathlib import Path
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
