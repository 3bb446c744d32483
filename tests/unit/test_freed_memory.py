"""Memory of large messages is used again instead of being cleared by the kernel each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE_FAULTS = """
import resource, sys
from engine_service.server.freed_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def message():
    return [bytes(bytearray(9 << 20)) for _ in range(3)]
for _ in range(3):
    message()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    message()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    """Of ten times three messages of 9 MiB, behind some that were like them."""
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS, mode],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_large_blocks_are_used_again() -> None:
    assert page_faults("kept") < 1000
    assert page_faults("as it is") > 10_000
