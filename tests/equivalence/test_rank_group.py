"""Several ranks behind one loop answer as one rank does, whatever happens to the requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 240.0
ROOT = Path(__file__).parents[2]


@cache
def answers(
    model: str,
    num_ranks: int,
    num_stages: int = 1,
    *,
    module: str = "mixed_requests",
    **flags: Any,
) -> dict[str, Any]:
    """What the module prints; `flags` are more fields of the config. Kept: it is the same every
    time, and many compare with what one rank says."""
    sizes = [str(num_ranks), str(num_stages), *([json.dumps(flags)] if flags else [])]
    command = [sys.executable, "-m", f"tests.equivalence.{module}", model, *sizes]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_two_and_four_ranks_answer_as_one(model: str) -> None:
    alone = answers(model, 1)
    assert alone["preemptions"] > 0
    assert "abort" in {choice[2] for answer in alone["answers"] for choice in answer}
    assert answers(model, 2) == alone
    assert answers(model, 4) == alone
    if model == "demo":  # the control: a follower that misses one plan changes the tokens
        assert answers(model, 2, module="missed_plan") != alone
