"""A mended interpreter computes, bit for bit, what Triton's own does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine_service.kernels.jit import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's interpreter")


def digests(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "tests.kernels.interpreted_ops", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_mended_it_computes_the_same_bits() -> None:
    first, again = digests("7")
    assert first == again
    mended = digests("mended", "7", "8")
    assert mended[:2] == [first, again]
    assert mended[2:] != [first, again], "the control"
