"""No request waits for a compiler: what requests launch has been launched at start-up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton's compiler")


def launches(*args: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.kernels.late_kernels", *args]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.slow
def test_requests_launch_nothing_that_is_not_compiled_yet() -> None:
    """Without CUDA graphs, where every step is launched as it is; with them more is compiled."""
    told = launches("demo")
    assert told["late"] == []
    assert told["known"] > 25


@pytest.mark.slow
def test_control_without_them_requests_wait() -> None:
    assert {"_short_kernel", "_redraw_kernel"} <= set(launches("demo", "cold")["late"])
